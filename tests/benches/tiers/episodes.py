"""Episodes whose pages exceed the pool: CPU seconds a token with tiers, and with pages that are dropped.

Each episode reads a long prompt, draws a few tokens, waits for a tool, reads its answer, and so on. All wait at some
time, so that those that draw take the pages of those that wait. An engine with room for all says what is right.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, split
from models.tiny import tiny
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.agent_loops.commands import Command, Completion, Generate, Observe, Wait
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.request import Request
from tools.bench.harness.protocol import now

VOCAB, PAGE = 272, 16


@dataclasses.dataclass(frozen=True)
class EpisodeJob:
    """Sizes of the job; lengths are in tokens."""

    episodes: int = 24
    prompt: int = 768
    turns: int = 6
    drawn: int = 16  # tokens of each turn
    answer: int = 48  # tokens of each tool
    rows: int = 8
    excess: float = 3.0  # pages of all episodes over those of the pool
    rounds: int = 3

    @property
    def completion(self) -> int:
        """Tokens behind the prompt."""
        return self.turns * (self.drawn + self.answer)

    @property
    def all_pages(self) -> int:
        """Pages of all episodes at their ends."""
        return self.episodes * -(-(self.prompt + self.completion) // PAGE)


QUICK = EpisodeJob(episodes=6, prompt=96, turns=2, drawn=4, answer=8, rows=2, rounds=1)


def policy() -> tuple[Any, Params]:
    """Return a small policy of random weights: what is measured does not depend on them."""
    cfg = tiny(vocab_size=VOCAB)
    return cfg, split(cfg.build(rngs=nnx.Rngs(0)))[1]


def measure(job: EpisodeJob) -> dict[str, Any]:
    """Return `cpu_ratio`, `identical`, and the figures that they come from."""
    model, weights = policy()
    with tempfile.TemporaryDirectory() as folder:
        cfg = RolloutEngine.Config(model=model, stop_tokens=(), max_num_seqs=job.rows, page_size=PAGE)
        cfg.set(max_prompt_tokens=job.prompt, max_new_tokens=job.completion, steps_per_dispatch=job.drawn)
        pool = 1 + int(job.all_pages / job.excess)
        host = _page_bytes(model) * job.all_pages // 4  # most pages go on to the disk
        tiers = {
            "dropped": None,
            "host": HostTiers.Config(),
            "disk": HostTiers.Config(host_bytes=host, disk=folder),
        }
        engines = {name: _engine(cfg.clone(pages=pool, tiers=one), weights) for name, one in tiers.items()}
        expected = _draw(_engine(cfg.clone(pages=1 + job.all_pages + job.rows), weights), job, 0)
        identical, seconds, rounds = True, {name: [] for name in engines}, range(-1, job.rounds)
        before: dict[str, dict[str, float]] = {}
        for number in rounds:  # the first compiles
            for name, engine in engines.items():
                engine.set_weights(weights, max(number, 0))  # clears what was cached
                before[name] = engine.stats()
                began = now()
                found = _draw(engine, job, 0)
                if number >= 0:
                    seconds[name].append(now().since(began).cpu)
                identical &= _same(found, expected)
        figures = {name: _figures(engines[name].stats(), before[name]) for name in engines}
    tokens = job.episodes * job.turns * job.drawn
    for name, spent in seconds.items():
        figures[name]["cpu_us_per_token"] = round(1e6 * statistics.median(spent) / tokens)
    ratios = {name: _ratio(seconds[name], seconds["dropped"]) for name in ("host", "disk")}
    return {
        "cpu_ratio": ratios["host"],
        "disk_cpu_ratio": ratios["disk"],
        "identical": identical,
        "episodes": job.episodes,
        "tokens_drawn": tokens,
        "pages_of_all": job.all_pages,
        "pages_of_pool": pool - 1,
        "by_engine": figures,
    }


def _engine(cfg: RolloutEngine.Config, weights: Params) -> RolloutEngine:
    engine = cfg.build()
    engine.set_weights(weights, 0)
    return engine


def _page_bytes(model: Any) -> int:
    attention = model.block.attention
    return model.num_layers * 2 * attention.num_kv_heads * attention.head_dim * PAGE * 4


def _draw(engine: RolloutEngine, job: EpisodeJob, seed: int) -> list[Rollout]:
    """Run all episodes; a tool answers once all other episodes have had their turn."""
    waiting: list[Future[None]] = []

    def loop(completion: Completion) -> Generator[Command, Any, None]:
        rng = np.random.default_rng(len(completion.prompt) + int(completion.prompt[0]))
        for _ in range(job.turns):
            yield Generate(max_new_tokens=job.drawn)
            waiting.append(future := Future())
            yield Wait(future)
            yield Observe(rng.integers(3, VOCAB, job.answer).tolist())

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCAB, job.prompt).astype(np.int32) for _ in range(job.episodes)]
    for number, tokens in enumerate(prompts):
        engine.submit(Request(Prompt(id=number, family="episodes", tokens=tokens), seed=seed, agent_loop=loop))
    found: dict[int, Rollout] = {}
    while engine.busy:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            found[output.number] = output.rollouts[0]
        if len(waiting) == job.episodes:
            for future in waiting:
                future.set_result(None)
            waiting.clear()
    return [rollout for _, rollout in sorted(found.items())]


def _same(found: list[Rollout], expected: list[Rollout]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        a.tokens.tobytes() == b.tokens.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes() for a, b in pairs
    )


def _figures(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return what the last round added."""
    names = [name for name in after if name.startswith("tier_") and not name.endswith(("host_bytes", "disk_bytes"))]
    chosen = ["prefill_tokens", "preemptions", "prefix_cache_hit_tokens", *names]
    return {name: round(after[name] - before[name], 3) for name in chosen}


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)
