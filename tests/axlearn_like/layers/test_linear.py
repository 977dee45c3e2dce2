import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.linear import project
from axlearn_like.layers.wrappers.matrix_forms import Transposed

pytestmark = pytest.mark.numerics

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("inputs", "outputs"), [((6,), (5,)), ((6,), (2, 3, 4)), ((2, 3, 4), (6,)), ((2, 3), (4, 5))])
def test_any_number_of_axes_is_one_contraction(inputs, outputs):
    x = RNG.normal(size=(2, 3, *inputs)).astype(np.float32)
    weight = RNG.normal(size=(*inputs, *outputs)).astype(np.float32)
    y = jax.jit(lambda x, w: project(x, w, inputs=len(inputs)))(x, weight)
    expected = np.tensordot(x.astype(np.float64), weight.astype(np.float64), axes=len(inputs))
    assert y.shape == (2, 3, *outputs)
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_the_weight_takes_the_type_of_the_activations():
    x = jnp.asarray(RNG.normal(size=(1, 2, 64)), jnp.bfloat16)
    weight = jnp.asarray(RNG.normal(size=(64, 4)), jnp.float32)
    y = project(x, weight)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) @ np.asarray(weight.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-7, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tied_head_is_the_same_for_few_rows_and_for_many(dtype):
    """The results are the same in a loop, before which XLA would transpose the table; to the bit in float32."""
    table = jnp.asarray(RNG.normal(size=(8192, 512)), dtype)
    x = jnp.asarray(RNG.normal(size=(9, 1, 8, 512)), dtype)

    def head(x):
        return project(x, Transposed(table), dtype=jnp.float32)

    few = jax.jit(lambda x: jax.lax.map(head, x))(x)
    many = jax.jit(head)(x.reshape(1, 72, 512))
    np.testing.assert_allclose(few.reshape(many.shape), many, rtol=0, atol=0 if dtype == jnp.float32 else 1e-3)


def test_a_wider_result_keeps_the_bits_of_the_accumulation():
    x = jnp.asarray(RNG.normal(size=(1, 2, 64)), jnp.bfloat16)
    weight = jnp.asarray(RNG.normal(size=(64, 4)), jnp.float32)
    y = project(x, weight, dtype=jnp.float32)
    assert y.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(weight.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(y, exact, atol=1e-5)
