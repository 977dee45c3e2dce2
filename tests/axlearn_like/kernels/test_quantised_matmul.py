"""Rounding and products of few bits against numpy in float64; gradients straight through."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from axlearn_like.kernels.quantised_matmul import (
    Numbers,
    dequantise,
    quantise,
    quantised_dot,
    quantised_products,
    round_to,
)
from axlearn_like.layers.linear import project
from mesh import make_mesh
from mesh.errors import UserError
from mesh.rules import partition

pytestmark = pytest.mark.numerics

MOST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # the number that the largest entry becomes


def reference(x: np.ndarray, axes: tuple[int, ...], numbers: Numbers, group: int | None = None) -> np.ndarray:
    """Return x rounded, in float64."""
    if group is not None:
        assert axes == (0,)
        return np.concatenate([reference(part, (0,), numbers) for part in x.reshape(-1, group, *x.shape[1:])])
    scale = np.abs(x.astype(np.float64)).max(axis=axes, keepdims=True) / MOST[numbers]
    steps = (x / scale).astype(jnp.float8_e4m3fn).astype(np.float64) if numbers == "fp8" else np.rint(x / scale)
    return steps * scale


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "group"), [("int8", None), ("int4", None), ("int4", 4), ("fp8", None)])
def test_rounding_is_to_the_nearest_of_each_channel_or_group(numbers: Numbers, group: int | None):
    weight = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    found = quantise(jnp.asarray(weight), [0], numbers, group)
    assert found.qvalue.shape == weight.shape and found.scale.shape == (1 if group is None else 16 // group, 6)
    np.testing.assert_allclose(dequantise(found, jnp.float32), reference(weight, (0,), numbers, group), atol=1e-6)
    value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(round_to(w, [0], numbers, group))))(jnp.asarray(weight))
    rounded = np.asarray(dequantise(found, jnp.float32))
    np.testing.assert_allclose(value, np.sin(rounded).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, np.cos(rounded), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["int8", "fp8"])
def test_a_product_and_its_gradients_are_those_of_the_rounded_arrays_in_float64(numbers: Numbers):
    rng = np.random.default_rng(1)
    x, w, g = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 16), (16, 6), (5, 6)))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(quantised_dot(x, w, numbers, None, None) * g)

    dx, dw = jax.grad(loss, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(w))
    y = quantised_dot(jnp.asarray(x), jnp.asarray(w), numbers, None, None)
    rounded_x, rounded_w = reference(x, (1,), numbers), reference(w, (0,), numbers)
    np.testing.assert_allclose(y, rounded_x @ rounded_w, atol=2e-4)
    np.testing.assert_allclose(dx, g @ rounded_w.T, atol=2e-4)
    np.testing.assert_allclose(dw, rounded_x.T @ g, atol=2e-4)
    assert np.abs(y - x @ w).max() > 1e-3
    held = quantised_dot(jnp.asarray(x), quantise(jnp.asarray(w), [0], numbers), numbers, None, None)
    np.testing.assert_array_equal(held, y)
    np.testing.assert_array_equal(quantised_dot(jnp.asarray(x[:2]), jnp.asarray(w), numbers, None, None), y[:2])


def test_products_and_gradients_are_sharded_as_those_of_floats_are():
    """Shapes and shardings alone; two devices agree with one, which explicit sharding makes the compiler's task."""
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:1] * 4)

    def trace(numbers: Numbers | None) -> Any:
        def loss(x: jax.Array, wide: jax.Array, narrow: jax.Array) -> jax.Array:
            with quantised_products(numbers):
                hidden = project(x, wide, out_axis="hidden")
                return jnp.sum(project(hidden, narrow, in_axis="hidden", like=x) ** 2)

        def array(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
            spec: Any = partition(*axes)
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(abstract, spec))

        with jax.sharding.use_abstract_mesh(abstract := mesh.abstract_mesh):
            x = array((4, 3, 16), "batch", None, None)
            weights = array((16, 8), "embed", "hidden"), array((8, 16), "hidden", "embed")
            return jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), x, *weights)

    described = lambda tree: [(leaf.shape, leaf.sharding.spec) for leaf in tree]  # noqa: E731
    assert described(trace("int8")) == described(trace(None))


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"group=5 does not divide the 16 inputs"):
        quantise(jnp.ones((16, 2)), [0], "int4", 5)
