"""A request that goes on in another engine: seconds to its first token, over pages that moved and computed again."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from rl.protocol.messages import Prompt, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.request import Request
from rl.rollout.scheduling.page_exports import export_pages, import_pages
from tests.benches.tiers.episodes import PAGE, VOCAB, policy


def measure(context: int, rounds: int) -> dict[str, Any]:
    """Return `move_ratio` at so many tokens of context; export, copy of the bytes and import count as the move."""
    model, weights = policy()
    cfg = RolloutEngine.Config(model=model, stop_tokens=(), max_num_seqs=1, page_size=PAGE, tiers=HostTiers.Config())
    cfg.set(max_prompt_tokens=context, max_new_tokens=16, steps_per_dispatch=4)
    source, target = cfg.build(), cfg.build()
    moved_s, computed_s, nbytes, identical = [], [], 0, True
    for number in range(rounds + 1):  # the first compiles
        for engine in (source, target):
            engine.set_weights(weights, number)
        tokens = np.random.default_rng(number).integers(3, VOCAB, context).astype(np.int32)
        request = Request(Prompt(id=number, family="moves", tokens=tokens), seed=0)
        rest = dataclasses.replace(request, partial=(_begin(source, request),))
        computed, seconds = _first_token(target, rest)
        computed_s.append(seconds)
        target.set_weights(weights, number)  # clears what was cached
        began = time.monotonic()
        data = export_pages(source, np.concatenate([tokens, rest.partial[0].tokens]))
        import_pages(target, bytes(data))
        packed = time.monotonic() - began
        moved, seconds = _first_token(target, rest)
        moved_s.append(packed + seconds)
        nbytes = len(data)
        identical &= moved.tokens.tobytes() == computed.tokens.tobytes()
    return {
        "move_ratio": round(statistics.median(a / b for a, b in zip(moved_s[1:], computed_s[1:], strict=True)), 3),
        "moved_tokens_identical": identical,
        "context": context,
        "moved_first_token_s": round(statistics.median(moved_s[1:]), 3),
        "computed_first_token_s": round(statistics.median(computed_s[1:]), 3),
        "moved_bytes": nbytes,
    }


def _begin(engine: RolloutEngine, request: Request) -> Rollout:
    """Prefill a request, draw its first tokens, and end it as a worker does that must go."""
    engine.submit(request)
    while not (engine.stats()["running"] and engine.stats()["generation_tokens"]):
        engine.step()
    (output,) = engine.abort_all()
    return output.rollouts[0]


def _first_token(engine: RolloutEngine, request: Request) -> tuple[Rollout, float]:
    """Return the rollout of the next tokens, and the seconds to the first of them."""
    began, first = time.monotonic(), []
    engine.submit(request, lambda *_: first.append(time.monotonic() - began))
    outputs = []
    while not outputs:
        outputs = engine.step()
    return outputs[0].rollouts[0], first[0]
