import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.base import bind, split
from axlearn_like.layers.feed_forward import GLU, FeedForward, SwiGLU
from tests.axlearn_like.layers import reference

pytestmark = pytest.mark.numerics


def test_it_is_the_equation():
    graphdef, params = split(SwiGLU.Config(dim=12, hidden=20).build(rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(2, 3, 12)).astype(np.float32)
    y = jax.jit(lambda p, x: bind(graphdef, p)(x)[0])(params, x)
    expected = reference.feed_forward(reference.float64(params), x.astype(np.float64))
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_the_spread_begins_as_the_inputs_demand():
    _, params = split(SwiGLU.Config(dim=64, hidden=256).build(rngs=nnx.Rngs(0)))
    # Cut at two standard deviations, a normal distribution has 0.880 of its spread left.
    for name, inputs in (("gate_df", 64), ("up_df", 64), ("down_fd", 256)):
        assert abs(float(params[name].std()) * inputs**0.5 - 0.880) < 0.03


def test_another_activation_of_the_gate():
    graphdef, params = split(GLU.Config(dim=12, hidden=20, activation="relu").build(rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(1, 3, 12)).astype(np.float32)
    p = reference.float64(params)
    expected = (np.maximum(x @ p["gate_df"], 0) * (x @ p["up_df"])) @ p["down_fd"]
    np.testing.assert_allclose(bind(graphdef, params)(x)[0], expected, atol=1e-6)


def test_a_plain_network_has_biases():
    graphdef, params = split(FeedForward.Config(dim=12, hidden=20, activation="relu").build(rngs=nnx.Rngs(0)))
    assert not params["up_bias_f"].any() and not params["down_bias_d"].any()
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)
    x = rng.normal(size=(1, 3, 12)).astype(np.float32)
    p = reference.float64(params)
    expected = np.maximum(x @ p["up_df"] + p["up_bias_f"], 0) @ p["down_fd"] + p["down_bias_d"]
    np.testing.assert_allclose(bind(graphdef, params)(x)[0], expected, atol=2e-6 * np.abs(expected).max())
