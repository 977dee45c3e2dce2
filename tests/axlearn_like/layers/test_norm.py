import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.base import bind, split
from axlearn_like.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from tests.axlearn_like.layers import reference

pytestmark = pytest.mark.numerics

RNG = np.random.default_rng(0)


def run(x, scale, eps):
    graphdef, _ = split(RMSNorm.Config(dim=scale.shape[0], eps=eps).build(rngs=nnx.Rngs(0)))
    return jax.jit(lambda p, x: bind(graphdef, p)(x))({"scale": jnp.asarray(scale)}, x)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_it_is_the_equation(eps):
    x = RNG.normal(size=(2, 3, 16)).astype(np.float32)
    scale = RNG.normal(size=16).astype(np.float32)
    expected = reference.norm(x.astype(np.float64), scale.astype(np.float64), eps)
    np.testing.assert_allclose(run(x, scale, eps), expected, rtol=2e-6, atol=1e-6)


def test_bfloat16_is_normalised_in_float32():
    x = jnp.asarray(RNG.normal(size=(4, 512)) * 30, jnp.bfloat16)
    scale = RNG.normal(size=512).astype(np.float32)
    y = run(x, scale, 1e-6)
    assert y.dtype == jnp.bfloat16
    exact = reference.norm(np.asarray(x, np.float64), scale.astype(np.float64), 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-6)
    # One rounding at the end: the nearest number, but for values halfway between two.
    assert np.mean(np.asarray(y) == exact.astype(jnp.bfloat16)) > 0.99


def test_the_scale_begins_at_one():
    _, params = split(RMSNorm.Config(dim=5).build(rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(params["scale"], np.ones(5))


def test_an_offset_scale_is_added_to_one_and_begins_at_zero():
    x = jnp.asarray(RNG.normal(size=(4, 16)), jnp.float32)
    scale = RNG.normal(size=16).astype(np.float32)
    graphdef, params = split(OffsetRMSNorm.Config(dim=16, eps=0.1).build(rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(params["scale"], np.zeros(16))
    y = bind(graphdef, {"scale": jnp.asarray(scale)})(x)
    np.testing.assert_allclose(y, run(x, 1 + scale, 0.1), rtol=1e-6)


def test_layer_norm_is_the_equation():
    x = RNG.normal(2.0, size=(2, 3, 16)).astype(np.float32)
    scale, bias = RNG.normal(size=(2, 16)).astype(np.float32)
    graphdef, _ = split(LayerNorm.Config(dim=16, eps=0.1).build(rngs=nnx.Rngs(0)))
    y = jax.jit(lambda p, x: bind(graphdef, p)(x))({"scale": jnp.asarray(scale), "bias": jnp.asarray(bias)}, x)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1) * scale + bias
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6)
