"""Weights rounded to int8: numbers and scales against numpy, gradients straight through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.wrappers.base import plain_params
from axlearn_like.layers.wrappers.int8 import Int8Weights, quantise, straight_through
from tests.axlearn_like.layers.small import initialise

SHAPES = {"down_fd": (5, 7), "q_dkqh": (3, 6, 2, 2, 4), "out_kqhd": (3, 2, 2, 4, 6), "gate_edf": (2, 3, 5, 7)}
INPUTS = {"down_fd": (0,), "q_dkqh": (1,), "out_kqhd": (1, 2, 3), "gate_edf": (2,)}


@pytest.mark.parametrize("name", SHAPES)
def test_each_output_channel_has_a_scale(name: str):
    weight = np.random.default_rng(0).normal(size=SHAPES[name]).astype(np.float32)
    weight[..., 0] = 0.0
    numbers, scale = map(np.asarray, quantise(name, jnp.asarray(weight)))
    largest = np.abs(weight.astype(np.float64)).max(axis=INPUTS[name], keepdims=True)
    expected = np.where(largest > 0, largest / 127, 1.0)
    np.testing.assert_allclose(scale, expected, rtol=1e-6)
    assert numbers.dtype == np.int8 and np.abs(numbers.astype(int)).max() == 127
    assert np.abs(numbers - weight / expected).max() <= 0.5 + 1e-4
    filled = np.abs(numbers[..., 1:].astype(int)).max(axis=INPUTS[name])
    assert (filled == 127).all() and not numbers[..., 0].any()


def test_forward_is_rounded_and_the_gradient_is_that_of_the_rounded_weight():
    weight = jax.random.normal(jax.random.key(0), (6, 4))
    numbers, scale = quantise("up_df", weight)
    rounded = numbers * scale
    value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(straight_through("up_df", w))))(weight)
    assert value == pytest.approx(float(jnp.sum(jnp.sin(rounded))), rel=1e-6)
    np.testing.assert_allclose(grad, jnp.cos(rounded), rtol=1e-6)
    assert (straight_through("up_df", weight) == rounded).all() and (rounded != weight).any()


def test_a_wrapped_layer_is_the_layer_with_rounded_weights():
    cfg = Int8Weights.Config(inner=SwiGLU.Config(dim=8, hidden=12), skip="up_*")
    graphdef, params = initialise(cfg)
    plain, _ = initialise(SwiGLU.Config(dim=8, hidden=12))
    rounded = {name: np.multiply(*quantise(name, params["inner"][name])) for name in ("gate_df", "down_fd")}
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    expected, _ = bind(plain, {**params["inner"], **rounded})(x)
    found, _ = bind(graphdef, params)(x)
    assert (found == expected).all()
    exported = plain_params(graphdef, params)
    assert (exported["gate_df"] == rounded["gate_df"]).all() and (exported["up_df"] == params["inner"]["up_df"]).all()
