"""Engines whose pages hold keys and values in rank space: what is refused, what they hold, and the kernel for TPUs."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError, replace
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.attention.rope_scaling import DynamicScaling
from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.wrappers.low_rank.factorised import FactorisedWeights, factorised_config
from rl.rollout.engine import RolloutEngine
from tests.bounds import within
from tests.elsewhere import elsewhere
from tests.rl.rollout.small import POLICY, STOP, make_engine, request
from tests.rl.rollout.test_engine_kernel import SIMULATED, SMALL
from tests.rl.rollout.test_engine_mesh import TWO_DEVICES
from tests.rl.tiny import tiny_params

HELD = FactorisedWeights.Config(rank=4, layers=("attention",), rank_cache=True)
ONE_HEAD = POLICY.clone()
replace(ONE_HEAD, Attention.Config, lambda attention: attention.set(num_kv_heads=1))


def described(**changes: Any) -> RolloutEngine.Config:
    return RolloutEngine.Config(**{"model": POLICY, "stop_tokens": STOP, "weights": HELD, **SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ("feed_forward",)}, r"layers: expected attention too with rank_cache"),
        ({"skip": "v_*"}, r"rank_cache: expected False where v_dkh stays whole"),
    ],
    ids=["layers", "whole values"],
)
def test_factors_that_make_no_smaller_cache_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_abstract(factorised_config(POLICY, HELD.clone(**changes)))


def test_latent_attention_is_refused():
    latent = POLICY.clone()
    other = LatentAttention.Config(num_heads=2, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8)
    replace(latent, Attention.Config, lambda _: other)
    with pytest.raises(ConfigError, match=r"rank_cache: expected False with LatentAttention"):
        build_abstract(factorised_config(latent, HELD.clone(rank=2, skip="[kv]_up_*")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cascade": 2}, r"cascade: expected None with weights\.rank_cache"),
        ({"kv_cache_dtype": "int8"}, r"kv_cache_dtype: expected None with weights\.rank_cache"),
        (
            {"kernel": SIMULATED, "model": ONE_HEAD, "weights": HELD.clone(rank=3)},
            r"rank_cache: expected False: pages of the kernel.*256 numbers of a token, and 256 of keys and",
        ),
    ],
    ids=["cascade", "int8", "one head of keys"],
)
def test_an_engine_refuses_what_its_cache_cannot_be(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        described(**changes).build()


def test_a_rotation_that_the_kernel_lacks_is_refused_there_alone():
    dynamic = POLICY.clone()
    scaled = Rope.Config(scaling=DynamicScaling.Config(factor=2.0, original_length=8))
    replace(dynamic, Rope.Config, lambda _: scaled)
    with pytest.raises(ConfigError, match=r"rank_cache: expected False on TPUs: .*Rope with DynamicScaling"):
        described(model=dynamic, kernel=SIMULATED).build()


@pytest.mark.numerics
@pytest.mark.full
def test_the_kernel_passes_its_self_test_and_draws_what_xla_does():
    requests = [request(number, samples=2) for number in range(3)]
    kernel, plain = (make_engine(stored=HELD, kernel=one, **SMALL) for one in (SIMULATED, PagedKernel.Config()))
    assert within(kernel.runner.kernel_choice["worst"], 1e-5)
    for found, right in zip(kernel.generate(requests), plain.generate(requests), strict=True):
        np.testing.assert_array_equal(found.tokens, right.tokens)
        np.testing.assert_allclose(found.logprobs, right.logprobs, atol=1e-4)


def drawn_by_kernel(mesh: dict[str, int]) -> list[list[Any]]:
    """Tokens and log-probabilities of four heads of keys, and the worst difference of the self-test."""
    model, held = POLICY.clone(), HELD.clone(rank=3)
    replace(model, Attention.Config, lambda attention: attention.set(num_kv_heads=4))
    engine = make_engine(tiny_params(model), model=model, stored=held, kernel=SIMULATED, **{**SMALL, "mesh": mesh})
    assert within(engine.runner.kernel_choice["worst"], 1e-5)
    return [[one.tokens.tolist(), one.logprobs.tolist()] for one in engine.generate([request(1, samples=2)])]


@pytest.mark.numerics
@pytest.mark.full
def test_on_two_devices_the_kernel_draws_the_same_tokens():
    found = elsewhere(drawn_by_kernel, {"tensor": 2}, environ=TWO_DEVICES)
    for (tokens, logprobs), expected in zip(found, drawn_by_kernel({}), strict=True):
        assert tokens == expected[0]
        np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=1e-4)


def test_pages_hold_ranks_and_not_heads():
    """Keys and values of two heads of four, of each token 4 + 4 numbers for 2 x 8."""
    held, plain = (numbers(described(weights=one).build()) for one in (HELD, None))
    assert 2 * held == plain


def numbers(engine: RolloutEngine) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(engine.runner.cache.pool))
