import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.base import bind, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.embedding import (
    Embedding,
    Float32Embedding,
    Float32Head,
    Head,
    PositionedEmbedding,
    ScaledEmbedding,
)

pytestmark = pytest.mark.numerics

RNG = np.random.default_rng(0)


def test_rows_are_looked_up_in_the_type_of_the_activations():
    graphdef, params = split(Embedding.Config(dim=8, vocab_size=10).build(rngs=nnx.Rngs(0)))
    tokens = np.array([[3, 3, 9], [0, 1, 2]], np.int32)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = bind(graphdef, params)(jnp.asarray(tokens), jnp.dtype(dtype))
        np.testing.assert_array_equal(x, np.asarray(params["weight_vd"].astype(dtype))[tokens])


def test_tied_logits_use_the_same_table():
    graphdef, params = split(Embedding.Config(dim=8, vocab_size=10, init_std=1.0).build(rngs=nnx.Rngs(0)))
    x = RNG.normal(size=(1, 2, 8)).astype(np.float32)
    logits = bind(graphdef, params).logits(jnp.asarray(x))
    expected = x.astype(np.float64) @ np.asarray(params["weight_vd"], np.float64).T
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_head_of_float32_factors_rounds_no_weight_in_a_model_of_bfloat16():
    x = jnp.asarray(RNG.normal(size=(1, 2, 8)), jnp.bfloat16)
    pairs = ((Embedding.Config, Float32Embedding.Config), (Head.Config, Float32Head.Config))
    for plain, unrounded in pairs:
        graphdef, params = split(unrounded(dim=8, vocab_size=10).build(rngs=nnx.Rngs(0)))
        (weight,) = jax.tree.leaves(params)
        matrix = np.asarray(weight, np.float64)
        exact = np.asarray(x, np.float64) @ (matrix.T if "weight_vd" in params else matrix)
        found = np.asarray(bind(graphdef, params).logits(x))
        np.testing.assert_allclose(found, exact, atol=1e-6)
        rounded = bind(split(plain(dim=8, vocab_size=10).build(rngs=nnx.Rngs(0)))[0], params).logits(x)
        assert np.abs(np.asarray(rounded) - exact).max() > 1e-5


def test_logits_are_float32_whatever_the_activations_are():
    x = jnp.asarray(RNG.normal(size=(1, 2, 8)), jnp.bfloat16)
    for cfg in (Embedding.Config(dim=8, vocab_size=10), Head.Config(dim=8, vocab_size=10)):
        graphdef, params = split(cfg.build(rngs=nnx.Rngs(0)))
        logits = bind(graphdef, params).logits(x)
        (weight,) = jax.tree.leaves(params)
        matrix = np.asarray(weight.astype(jnp.bfloat16), np.float64)
        exact = np.asarray(x, np.float64) @ (matrix.T if "weight_vd" in params else matrix)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, exact, atol=1e-6)


def test_the_table_begins_with_the_given_spread():
    _, params = split(Embedding.Config(dim=64, vocab_size=200, init_std=0.3).build(rngs=nnx.Rngs(0)))
    # Cut at two standard deviations, a normal distribution has 0.880 of its spread left.
    assert abs(float(params["weight_vd"].std()) / 0.3 - 0.880) < 0.02


@pytest.mark.slow
def test_a_scale_is_rounded_as_the_activations_are_and_logits_stay_below_the_cap():
    cfg = ScaledEmbedding.Config(dim=48, vocab_size=10, init_std=4.0, logit_soft_cap=30.0)
    graphdef, params = split(cfg.build(rngs=nnx.Rngs(0)))
    layer, tokens = bind(graphdef, params), jnp.array([[1, 2]])
    x = layer(tokens, jnp.dtype(jnp.bfloat16))
    rounded = np.float32(jnp.asarray(48**0.5, jnp.bfloat16))
    assert x.dtype == jnp.bfloat16 and abs(rounded - 48**0.5) > 1e-3
    exact = np.asarray(params["weight_vd"].astype(jnp.bfloat16), np.float32)[[1, 2]] * rounded
    np.testing.assert_array_equal(x[0], exact.astype(jnp.bfloat16))
    wide = layer(tokens, jnp.dtype(jnp.float32))
    plain = np.asarray(wide, np.float64) @ np.asarray(params["weight_vd"], np.float64).T
    assert np.abs(plain).max() > 60
    np.testing.assert_allclose(layer.logits(wide), 30 * np.tanh(plain / 30), rtol=1e-5, atol=1e-4)


def test_learned_positions_are_added_and_padding_behind_the_last_takes_it():
    cfg = PositionedEmbedding.Config(dim=8, vocab_size=10, max_length=3)
    graphdef, params = split(cfg.build(rngs=nnx.Rngs(0)))
    tokens, positions = jnp.array([[4, 4, 5, 6, 7]]), jnp.array([[0, 1, 2, 0, 9]])
    x = bind(graphdef, params)(tokens, jnp.dtype(jnp.float32), PackedContext(positions, positions))
    table, places = (np.asarray(params[name]) for name in ("weight_vd", "positions_vd"))
    np.testing.assert_array_equal(x[0], table[[4, 4, 5, 6, 7]] + places[[0, 1, 2, 0, 2]])
