"""Products and row sums in fixed tiles: values, and a row's bits whatever rows stand beside it (simulated)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.exact.matmul import DEPTH, ROWS, columns_of_block, exact_matmul
from axlearn_like.kernels.exact.row_sums import exact_row_sums
from tests.axlearn_like.kernels.mosaic import mosaic_texts, steps_of, without_batch

pytestmark = pytest.mark.numerics


def numbers(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32), dtype)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def product(dtype: Any, *, table: bool = False) -> Callable[[jax.Array], jax.Array]:
    weight = numbers(*((72, DEPTH + 88) if table else (DEPTH + 88, 72)), dtype=dtype)
    return jax.jit(partial(exact_matmul, weight=weight, dtype=jnp.float32, table=table, interpret=True))


def check_rows(run: Callable[[jax.Array], jax.Array], x: jax.Array, counts: list[int], places: list[int]) -> None:
    whole = np.asarray(run(x))
    for count in counts:
        for place in places:
            np.testing.assert_array_equal(run(x[place : place + count]), whole[place : place + count])


@pytest.mark.slow
def test_products_are_those_of_float64_and_rows_have_their_bits_in_any_batch():
    x, run = numbers(ROWS + 9, DEPTH + 88), product(jnp.float32)
    right = np.asarray(x, np.float64) @ np.asarray(numbers(DEPTH + 88, 72), np.float64)
    np.testing.assert_allclose(run(x), right, atol=4e-6 * np.abs(right).max())  # sums of 600 terms
    check_rows(run, x, [1, 8], [3])


@pytest.mark.slow
def test_sums_are_those_of_float64_and_rows_have_their_bits_in_any_batch():
    x = numbers(40, 300)
    run = jax.jit(partial(exact_row_sums, squares=True, interpret=True))
    right = np.sum(np.asarray(x, np.float64) ** 2, axis=1, keepdims=True)
    np.testing.assert_allclose(run(x), right, rtol=1e-6)
    check_rows(run, x, [1], [17])


@pytest.mark.full
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_number_of_rows_and_no_place_changes_a_bit(dtype: Any, table: bool):
    x = numbers(2 * ROWS + 9, DEPTH + 88, dtype=dtype)
    check_rows(product(dtype, table=table), x, [*range(1, 17), 63, 64, 65, 127, 128, 129], [0, 5, 130])
    x = numbers(200, 4100, dtype=dtype)  # two tiles, the second of 4 columns
    right = np.sum(np.asarray(x, np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(exact_row_sums(x, interpret=True), right, atol=1e-4)
    check_rows(jax.jit(partial(exact_row_sums, interpret=True)), x, [1, 2, 7, 33, 70], [0, 5, 130])


@pytest.mark.parametrize("rows", [(8, 64, 1000)])
def test_one_kernel_serves_all_numbers_of_rows(rows: tuple[int, ...]):
    weight = array(4096, 1024)
    texts = [mosaic_texts(exact_matmul, array(count, 4096), weight)[0] for count in rows]
    assert [steps_of(text) for text in texts] == [[2, 1], [2, 1], [2, 8]]
    assert len({without_batch(text) for text in texts}) == 1 and texts[0].count("tpu.matmul") == 4096 // DEPTH
    texts = [mosaic_texts(exact_row_sums, array(count, 4096))[0] for count in rows]
    assert [steps_of(text) for text in texts] == [[1, 1], [2, 1], [32, 1]]
    assert len({without_batch(text) for text in texts}) == 1


def test_another_tile_is_another_text(monkeypatch: pytest.MonkeyPatch):
    (one,) = mosaic_texts(exact_row_sums, array(8, 256))
    (other,) = mosaic_texts(exact_row_sums, array(8, 512))
    assert without_batch(one) != without_batch(other)


def test_blocks_depend_on_the_matrix_alone():
    assert [columns_of_block(depth, 2) for depth in (896, 4096, 27648)] == [1024, 512, 128]
