"""Grouped products against a loop over rows, on the platform of the tests: CPUs, where it is done in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.grouped_matmul import grouped_product, in_blocks

GROUPS, IN, OUT, ROWS = 5, 12, 20, 150


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@jax.jit
def product_and_gradients(x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    y, pull = jax.vjp(lambda x, w: grouped_product(x, w, sizes), x, w)
    return y, *pull(dy)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("sizes", [(70, 0, 3, 64, 13), (0, 0, 150, 0, 0), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0)])
def test_every_row_is_multiplied_with_its_groups_matrix(sizes):
    x, w, dy = numbers(ROWS, IN), numbers(GROUPS, IN, OUT, seed=1), numbers(ROWS, OUT, seed=2)
    y, dx, dw = product_and_gradients(x, w, np.array(sizes, np.int32), dy)
    expected, expected_dx, expected_dw = np.zeros((ROWS, OUT)), np.zeros((ROWS, IN)), np.zeros(w.shape)
    for row, group in enumerate(np.repeat(np.arange(GROUPS), sizes)):
        expected[row] = x[row].astype(np.float64) @ w[group]
        expected_dx[row] = dy[row].astype(np.float64) @ w[group].T
        expected_dw[group] += np.outer(x[row].astype(np.float64), dy[row])
    live = sum(sizes)  # what comes out for other rows is not defined
    np.testing.assert_allclose(y[:live], expected[:live], atol=2e-5)
    np.testing.assert_allclose(dx[:live], expected_dx[:live], atol=2e-5)
    np.testing.assert_allclose(dw, expected_dw, atol=6e-5)


@pytest.mark.slow
def test_a_row_is_the_same_to_the_bit_alone_and_among_others():
    w = numbers(GROUPS, IN, OUT, seed=1)
    x = numbers(ROWS, IN)
    product = jax.jit(grouped_product)
    among = np.asarray(product(x, w, np.array([60, 30, 0, 40, 20], np.int32)))
    for row, group in ((0, 0), (59, 0), (75, 1), (130, 4)):
        alone = product(x[row : row + 1], w, np.eye(GROUPS, dtype=np.int32)[group])
        np.testing.assert_array_equal(alone[0], among[row])


@pytest.mark.slow
def test_no_more_than_one_block_for_each_group_is_not_full():
    sizes = np.array([70, 0, 3, 64, 13], np.int32)
    blocks = in_blocks(jnp.asarray(sizes), ROWS, 64)
    assert int(blocks.used) == sum(-(-size // 64) for size in sizes) == 5
    rows = np.asarray(blocks.row)[np.asarray(blocks.filled)]
    np.testing.assert_array_equal(rows, np.arange(ROWS))  # each once, in order
    assert np.asarray(blocks.group)[:5].tolist() == [0, 0, 2, 3, 4]
