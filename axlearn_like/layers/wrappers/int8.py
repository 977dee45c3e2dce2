"""Quantisation-aware training: weights rounded to eight bits in the forward pass."""

import jax
import jax.numpy as jnp

from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import matrix_axes
from axlearn_like.layers.wrappers.base import Wrapper, parameter, replaced

LEVELS = 127  # on either side of zero


class Int8Weights(Wrapper):
    """The inner layer with every matrix rounded to int8, one scale for each output channel.

    The forward pass uses the rounded weights (Jacob et al. 2018, arXiv 1712.05877, 3); the gradient goes to the full
    ones as if nothing had been rounded (straight-through, Bengio et al. 2013, arXiv 1308.3432). Activations are not
    rounded, and products are those of the inner layer in the type of the activations: this gives a model that loses
    nothing when its weights are stored in int8, and saves neither memory nor time in training.
    """

    class Config(Wrapper.Config):
        pass

    def weights(self, params: Params) -> Params:
        """Return the rounded weights."""
        return replaced(params, {name: straight_through(name, parameter(params, name)) for name in self.names})


def quantise(name: str, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 numbers from -127 to 127 and float32 scales, whose product is the weight to half a scale.

    Args:
        name: of the parameter; its suffix gives the input axes.
        weight: with any number of stack axes.

    Returns:
        Numbers in the shape of the weight, and scales in that shape with input axes of size 1: the largest magnitude of
        an output channel / 127, 1 for channels of zeros.
    """
    axes = matrix_axes(name, weight.ndim)
    assert axes is not None, "only matrices have output channels"
    weight = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=axes.inputs, keepdims=True)
    scale = jnp.where(largest > 0, largest / LEVELS, 1.0)
    return jnp.round(weight / scale).astype(jnp.int8), scale


def straight_through(name: str, weight: jax.Array) -> jax.Array:
    """Return the rounded weight in the weight's type; its gradient is the weight's."""
    numbers, scale = quantise(name, jax.lax.stop_gradient(weight))
    rounded = (numbers.astype(jnp.float32) * scale).astype(weight.dtype)
    # Not weight + stop_gradient(rounded - weight), which is rounded once more.
    return rounded + (weight - jax.lax.stop_gradient(weight))
