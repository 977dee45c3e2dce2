"""An engine with an int8 cache draws from one policy, that whose attention reads rounded keys and values."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.kernels.int8_heads import restore, round_heads
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.wrappers.quantised import StoredWeights
from axlearn_like.training.losses import chosen_tokens
from models.tiny import tiny
from rl.objective import TruncatedImportance
from rl.objective.presets import grpo
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.speculation.speculator import Speculation
from rl.training.logprobs import fill_rows
from tests.rl.rollout.small import (
    TEMPERATURE,
    assert_no_page_is_held,
    assert_same,
    make_engine,
    mixed,
    request,
)
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_policy

REQUESTS = mixed(8)
LENGTH = 64
SMALL = tiny_policy(num_layers=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedRows(RowContext):
    """Whole rows whose attention reads rounded keys and values, without a cache."""

    def attend(self, q_rckqh: Any, k_rckh: Any, v_rckh: Any, cache: Any, attention: Any) -> Any:
        k, v = (restore(*round_heads(x), x.dtype) for x in (k_rckh, v_rckh))
        return super().attend(q_rckqh, k, v, cache, attention)


@partial(jax.jit, static_argnums=4)
def score(weights: Any, tokens: jax.Array, targets: jax.Array, temperature: jax.Array, context: Any) -> Any:
    graphdef, _ = split(build_abstract(SMALL))
    model = bind(graphdef, weights)
    rows = context(np.broadcast_to(np.arange(LENGTH), tokens.shape))
    return chosen_tokens(no_fuse(model.logits(model.hidden(tokens, rows).x) / temperature), targets)


@pytest.mark.slow
def test_log_probabilities_are_those_of_scoring_with_rounded_keys_and_values_to_the_bit():
    """After preemptions too: what is prefilled again is rounded as it was."""
    requests = [request(number) for number in (5, 4, 2)]
    engine = make_engine(kv_cache_dtype="int8", max_num_seqs=2, pages=12, model=SMALL, weights=tiny_params(SMALL))
    found = engine.generate(requests)
    assert engine.stats()["preemptions"] > 0
    prompts = [q.prompt.tokens for q in requests for _ in range(q.samples)]
    rows = fill_rows([(p, r.tokens) for p, r in zip(prompts, found, strict=True)], 16, LENGTH)
    parts = rows["tokens"], rows["targets"], np.array([TEMPERATURE], np.float32)
    rounded, plain = (score(tiny_params(SMALL), *parts, context).logprobs() for context in (RoundedRows, RowContext))
    for index, (prompt, rollout) in enumerate(zip(prompts, found, strict=True)):
        own = slice(len(prompt) - 1, len(prompt) - 1 + len(rollout.tokens))
        assert rounded[index, own].tobytes() == rollout.logprobs.tobytes()
        assert rollout.tags == ("int8-kv",)
        assert 0 < np.abs(plain[index, own] - rollout.logprobs).mean() < 0.05  # another policy, a near one


def by_sample(rollout: Any) -> tuple[int, int]:
    return rollout.prompt_id, rollout.sample_id


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Rollouts of each request, one request after the other, on an engine with room."""
    engine = make_engine(kv_cache_dtype="int8")
    return [rollout for q in REQUESTS for rollout in engine.generate([q])]


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"pages": 12},  # of four sequences that may run, these hold one and a bit: preemption, resumption
        {"max_num_seqs": 9, "page_size": 32, "steps_per_dispatch": 7, "prefill_tokens": 128},
        {"speculation": Speculation.Config()},
        {"cascade": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_any_engine_gives_the_same_bits(alone: list[Any], changes: dict[str, Any]):
    engine = make_engine(kv_cache_dtype="int8", **changes)
    assert_same(engine.generate(REQUESTS), alone)
    assert_no_page_is_held(engine)
    assert (engine.stats()["preemptions"] > 0) == ("pages" in changes)
    again = engine.generate(REQUESTS[::-1])  # prompts are cached now, and their scales with them
    assert_same(sorted(again, key=by_sample), sorted(alone, key=by_sample))
    assert engine.stats()["prefix_cache_hit_tokens"] > 0


def test_pages_are_half_of_those_of_bfloat16_and_a_scale_for_each_token_and_head():
    policy = tiny(vocab_size=64, dim=256, hidden=64, num_layers=1).set(dtype="bfloat16")

    def pages(dtype: Any) -> tuple[int, int]:
        cfg = RolloutEngine.Config(
            model=policy, stop_tokens=(), max_prompt_tokens=8, max_new_tokens=8, kv_cache_dtype=dtype
        )
        pool = ModelRunner(cfg.set(max_num_seqs=1), jax.devices()[:1]).cache.pool
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool)), pool["k"].shape[2]

    (rounded, width), (plain, _) = pages("int8"), pages(None)
    assert width >= 32 and rounded / plain == (width + 4) / (2 * width)


def test_latents_are_not_rounded():
    latent = tiny_policy()
    block: Any = latent.block
    block.attention = LatentAttention.Config(num_heads=2, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=8)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: expected None for a policy with latent attention"):
        make_engine(kv_cache_dtype="int8", model=latent)


def test_a_run_without_importance_correction_is_refused():
    cfg = tiny_experiment()
    cfg.engine.set(kv_cache_dtype="int8", weights=StoredWeights.Config())
    with pytest.raises(ConfigError, match=r"objective\.importance: .*of int8-weights and int8-kv"):
        cfg.check("inprocess")
    cfg.engine.weights = None
    with pytest.raises(ConfigError, match=r"objective\.importance: .*of int8-kv"):
        cfg.check("inprocess")
    cfg.objective = grpo().set(old_policy="current", importance=TruncatedImportance.Config())
    cfg.check("inprocess")
