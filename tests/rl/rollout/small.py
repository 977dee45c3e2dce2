"""Engines of a few thousand parameters for tests, mixed requests for them, and what rollouts are compared with."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.contexts.paged import RowContext
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.request import Request, RequestOutput, StopConditions
from rl.rollout.sampling import Sampler
from rl.training.logprobs import score_rows
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy

POLICY = tiny_policy(num_layers=2)
VOCAB = 272
MAX_PROMPT, MAX_NEW = 40, 24
STOP = tuple(range(0, VOCAB, 16))  # a sixteenth of the vocabulary: completions of all lengths
PLAIN = StopConditions(tokens=STOP)
TEMPERATURE = 0.8


def params(seed: int = 0) -> Params:
    return tiny_params(POLICY, seed)


def make_engine(
    weights: Params | None = None,
    version: int = 5,
    *,
    adapters: AdapterLimits | None = None,
    stored: Any = None,
    **changes: Any,
) -> RolloutEngine:
    """An engine with weights; `changes` are fields of its config, `stored` its `weights`."""
    sizes = {"max_num_seqs": 4, "page_size": 8, "steps_per_dispatch": 4, "prefill_tokens": 64, **changes}
    sizes = {
        "max_prompt_tokens": MAX_PROMPT,
        "max_new_tokens": MAX_NEW,
        "sampler": Sampler.Config(temperature=TEMPERATURE),
        **sizes,
    }
    cfg = RolloutEngine.Config(stop_tokens=STOP, weights=stored, **{"model": POLICY, **sizes})
    engine = cfg.build(decode=text, adapters=adapters)
    engine.set_weights(params() if weights is None else weights, version)
    return engine


def text(tokens: Iterable[int]) -> str:
    """Return the text of tokens, one character each."""
    return "".join(chr(0x100 + int(token)) for token in tokens)


def request(number: int, **fields: Any) -> Request:
    """Prompts of all lengths up to the longest; some ids need more than 32 bits."""
    prompt = make_prompt(number + (number % 3 << 33), 1 + number * 7 % MAX_PROMPT)
    return Request(prompt, **{"samples": 1 + number % 3, "seed": 11, **fields})


# Mixtures of rules are compiled for themselves: with a temperature alone, with more, with a penalty and a bias.
PENALTIES = Sampler.Config(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25)
RULES = PENALTIES.clone(min_p=0.01, logit_bias=((3, 2.0), (7, -4.0)))
SAMPLERS = (None, Sampler.Config(top_k=20, top_p=0.9), RULES, None, Sampler.Config(temperature=0.0))


def mixed(count: int) -> list[Request]:
    """Requests of many lengths, rules and numbers of samples."""
    return [
        request(
            number,
            sampler=SAMPLERS[number % 5],
            stop=(None, PLAIN, StopConditions(STOP, (chr(0x100 + 77), chr(0x100 + 5)), 20))[number % 3],
        )
        for number in range(count)
    ]


class Stepped(Protocol):
    """An engine, as far as `drain` needs it."""

    @property
    def busy(self) -> bool: ...

    def step(self) -> Sequence[RequestOutput]: ...


def drain(engine: Stepped, turns: int = 5000) -> dict[int, RequestOutput]:
    """Step until nothing is under way; what has finished, by number, each once."""
    finished: dict[int, RequestOutput] = {}
    for _ in range(turns):
        for one in engine.step():
            assert one.number not in finished
            finished[one.number] = one
        if not engine.busy:
            return finished
    raise AssertionError(f"still busy after {turns} turns")


def assert_same(found: Sequence[Rollout], expected: Sequence[Rollout], *, versions: bool = True) -> None:
    """Assert that rollouts are equal to the bit; `versions`: the versions of their tokens too."""
    assert [(r.prompt_id, r.sample_id) for r in found] == [(r.prompt_id, r.sample_id) for r in expected]
    for a, b in zip(found, expected, strict=True):
        assert (a.finish_reason, a.tags) == (b.finish_reason, b.tags)
        for name in ("tokens", "logprobs", "action_mask") + ("versions",) * versions:
            x, y = getattr(a, name), getattr(b, name)
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


def assert_no_page_is_held(engine: RolloutEngine) -> None:
    """Assert that no page is held except by the prefix cache."""
    stats = engine.stats()
    assert stats["pages_used"] == stats["prefix_cache_pages"]
    assert stats["running"] == stats["waiting"] == stats["suspended"] == 0


def _model(weights: Params) -> Any:
    graphdef, _ = split(build_abstract(POLICY))
    return bind(graphdef, weights)


def _plain_logits(weights: Params, tokens: jax.Array) -> jax.Array:
    model = _model(weights)
    context = RowContext(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    return model.logits(model.hidden(tokens, context).x)


_ROWS, _LENGTH = 16, 64
_logits = jax.jit(_plain_logits)
_scores = jax.jit(lambda weights, tokens, targets, t: score_rows(_model(weights), tokens, targets, t))


def _in_rows(pairs: Sequence[tuple[Prompt, Rollout]]) -> np.ndarray:
    rows = np.zeros((_ROWS, _LENGTH + 1), np.int32)
    for row, (prompt, rollout) in enumerate(pairs):
        whole = np.concatenate([prompt.tokens, rollout.tokens])
        rows[row, : len(whole)] = whole
    return rows


def _at(prompt: Prompt, rollout: Rollout) -> slice:
    return slice(len(prompt.tokens) - 1, len(prompt.tokens) - 1 + len(rollout.tokens))


def plain_logits(weights: Params, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[np.ndarray]:
    """float32 [tokens, vocab] of each completion, of a forward pass over whole rows without a cache."""
    found = []
    for first in range(0, len(pairs), _ROWS):
        part = pairs[first : first + _ROWS]
        logits = np.asarray(_logits(weights, _in_rows(part)[:, :-1]))
        found += [logits[row, _at(*pair)] for row, pair in enumerate(part)]
    return found


def scores(
    weights: Params, pairs: Sequence[tuple[Prompt, Rollout]], temperature: float = TEMPERATURE
) -> list[np.ndarray]:
    """Log-probabilities float32 [tokens] of each completion, by rl/training/logprobs.py."""
    found = []
    for first in range(0, len(pairs), _ROWS):
        part = pairs[first : first + _ROWS]
        rows = _in_rows(part)
        logprobs = _scores(weights, rows[:, :-1], rows[:, 1:], np.array([temperature], np.float32)).logprobs()
        found += [logprobs[row, _at(*pair)] for row, pair in enumerate(part)]
    return found
