"""Grouped products with a layer's matrices in the stack of all, by the simulated kernel: bits, values of float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.quantised_matmul import quantise
from axlearn_like.kernels.stacked_grouped_matmul import is_turned, plan_visits, rows_of_tile, stacked_product
from tests.bounds import within

pytestmark = pytest.mark.numerics

LAYERS, GROUPS, ROWS = 2, 5, 40
SIZES = [(17, 0, 3, 20, 0), (0, 0, 40, 0, 0), (0, 1, 1, 1, 0), (0, 0, 0, 0, 0)]


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@jax.jit
def product(x: jax.Array, stack: Any, layer: jax.Array, sizes: jax.Array) -> jax.Array:
    return stacked_product(x, stack, layer, sizes, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtype"), [((128, 24), jnp.float32), ((24, 128), jnp.bfloat16)])
def test_a_layer_has_the_bits_of_its_own_stack_and_the_values_of_float64(shape: tuple[int, int], dtype: Any):
    assert is_turned(*shape) is (shape == (128, 24))  # held transposed by TPUs, or not
    x, stack = numbers(ROWS, shape[0]).astype(dtype), numbers(LAYERS, GROUPS, *shape, seed=1).astype(dtype)
    for sizes in SIZES:
        live, counts = sum(sizes), np.array(sizes, np.int32)
        group = np.repeat(np.arange(GROUPS), sizes)
        found = np.asarray(product(x, stack, np.int32(LAYERS - 1), counts).astype(jnp.float32))[:live]
        alone = product(x, stack[-1:], np.int32(0), counts).astype(jnp.float32)
        np.testing.assert_array_equal(found, np.asarray(alone)[:live])
        rows, matrices = np.asarray(x[:live], np.float64), np.asarray(stack[-1], np.float64)[group]
        right = np.einsum("ri,rio->ro", rows, matrices)
        np.testing.assert_allclose(found, right, atol=1e-4 if dtype == jnp.float32 else 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(128, 24), (24, 128)])
def test_numbers_of_int8_are_multiplied_by_the_scales_of_their_columns(shape: tuple[int, int]):
    stack = numbers(LAYERS, GROUPS, *shape, seed=1) * jnp.arange(1, 1 + shape[1])  # columns with scales of their own
    held = quantise(stack, [2], "int8")
    values = np.asarray(held.qvalue, np.float64) * np.asarray(held.scale, np.float64)
    for dtype, error in ((jnp.float32, 4e-6), (jnp.bfloat16, 1e-2)):
        x, sizes = numbers(ROWS, shape[0]).astype(dtype), np.array(SIZES[0], np.int32)
        right = np.einsum("ri,rio->ro", np.asarray(x, np.float64), values[1][np.repeat(np.arange(GROUPS), sizes)])
        found = np.asarray(product(x, held, np.int32(1), sizes), np.float64)
        assert within(found - right, error * np.abs(right).max())


@pytest.mark.slow
def test_every_row_is_in_one_visit_and_no_empty_group_is_visited():
    for sizes in SIZES:
        visits = plan_visits(jnp.array(sizes, jnp.int32), 48, 16)
        assert int(visits.used) >= 1  # the grid is not empty even if there are no rows
        seen = []
        for v in range(int(visits.used)):
            tile, group = int(visits.tile[v]), int(visits.group[v])
            rows = range(max(16 * tile, int(visits.start[v])), min(16 * tile + 16, int(visits.end[v])))
            assert (len(rows) > 0 and sizes[group] > 0) or (v == 0 and not any(sizes))
            seen += [(row, group) for row in rows]
        assert seen == list(enumerate(np.repeat(np.arange(GROUPS), sizes).tolist()))


def test_a_tile_has_room_for_the_rows_of_a_group_and_is_not_much_larger():
    assert [rows_of_tile(*shape) for shape in ((8, 128), (512, 128), (4096, 128), (65536, 8))] == [16, 16, 64, 128]
