"""The attention layer against numpy in float64, head by head; contexts are tested in test_context.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.attention.grouped_query import MERGEABLE, Attention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.norm import RMSNorm
from mesh import UserError, make_mesh
from tests.axlearn_like.layers import reference
from tests.axlearn_like.layers.small import initialise

DIM, LENGTH = 24, 9
POSITIONS = np.array([0, 1, 2, 3, 4, 0, 1, 2, 0], np.int32)
SEGMENTS = np.array([1, 1, 1, 1, 1, 2, 2, 2, 0], np.int32)
KINDS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_heads": 3},
    "grouped": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 10},
    "one key/value head": {"num_heads": 4, "num_kv_heads": 1},
    "biases": {"num_heads": 4, "num_kv_heads": 2, "qkv_bias": True},
    "qk-norm": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": RMSNorm.Config(eps=0.1)},
}


def build(cfg: Attention.Config):
    return initialise(cfg.clone(dim=DIM))


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_equation(kind):
    graphdef, params = build(Attention.Config(**KINDS[kind], rope=Rope.Config(theta=100.0)))
    x = np.random.default_rng(2).normal(size=(1, LENGTH, DIM)).astype(np.float32)
    context = PackedContext(jnp.asarray(POSITIONS[None]), jnp.asarray(SEGMENTS[None]))
    y, cache = jax.jit(lambda p, x, c: bind(graphdef, p)(x, c, None))(params, x, context)
    expected = reference.attention(
        reference.float64(params), x[0].astype(np.float64), POSITIONS, SEGMENTS, theta=100.0, eps=0.1
    )
    assert cache is None
    np.testing.assert_allclose(y[0], expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_weights_with_merged_head_axes_give_the_same_bits(kind):
    graphdef, params = build(Attention.Config(**KINDS[kind]))
    merged = {name: p.reshape(DIM, -1) if name in MERGEABLE else p for name, p in params.items()}
    assert any(merged[name].shape != params[name].shape for name in MERGEABLE)
    x = np.random.default_rng(3).normal(size=(1, LENGTH, DIM)).astype(np.float32)
    context = PackedContext(jnp.asarray(POSITIONS[None]), jnp.asarray(SEGMENTS[None]))
    attend = jax.jit(lambda p: bind(graphdef, p)(x, context, None)[0])
    np.testing.assert_array_equal(attend(merged), attend(params))


def test_optional_parameters_are_there_only_when_asked_for():
    plain = {"q_dkqh", "k_dkh", "v_dkh", "out_kqhd"}
    assert set(build(Attention.Config(**KINDS["grouped"]))[1]) == plain
    assert set(build(Attention.Config(**KINDS["biases"]))[1]) == plain | {"q_bias_kqh", "k_bias_kh", "v_bias_kh"}
    assert set(build(Attention.Config(**KINDS["qk-norm"]))[1]) == plain | {"q_norm", "k_norm"}


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="Attention.num_heads: expected a multiple of num_kv_heads=4, got 6"):
        build(Attention.Config(num_heads=6, num_kv_heads=4))
    with pytest.raises(UserError, match="Attention.dim: expected a multiple of num_heads=5, got 24"):
        build(Attention.Config(num_heads=5))


def test_key_value_heads_must_divide_over_the_mesh():
    def shapes(cfg: Attention.Config):
        return split(build_abstract(cfg.set(dim=DIM)))[1]

    mesh = make_mesh({"tensor": 4}, jax.devices()[:1] * 4).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        for heads in (4, 8):
            shapes(Attention.Config(num_heads=8, num_kv_heads=heads, head_dim=4))
        with pytest.raises(UserError, match=r"num_kv_heads=2 do not divide evenly over the mesh \(tensor 4\)"):
            shapes(Attention.Config(num_heads=8, num_kv_heads=2, head_dim=4))
