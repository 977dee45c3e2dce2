"""Grouped products in fixed tiles: values, and a row's bits whatever rows its group and the others have (simulated)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.exact.matmul import ROWS, exact_grouped_matmul
from axlearn_like.kernels.stacked_grouped_matmul import is_turned
from tests.axlearn_like.kernels.mosaic import mosaic_texts, without_batch

GROUPS, DEPTH = 3, 48


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(x: np.ndarray, stack: np.ndarray, sizes: list[int], **options: Any) -> np.ndarray:
    arrays = jnp.asarray(x), jnp.asarray(stack), jnp.asarray(sizes, jnp.int32)
    return np.asarray(exact_grouped_matmul(*arrays, 1, interpret=True, **options))[: sum(sizes)]


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("columns", [20, 128])
def test_rows_are_multiplied_with_their_groups_matrix_of_the_layer(columns: int):
    """One of the two is held as its transpose, and a group is empty."""
    assert is_turned(DEPTH, columns) == (columns == 20)
    sizes, stack = [ROWS - 9, 0, 30], numbers(2, GROUPS, DEPTH, columns, seed=1)
    x = numbers(sum(sizes) + 5, DEPTH)
    right = [x[: sizes[0]] @ stack[1, 0].astype(np.float64), x[sizes[0] : sum(sizes)] @ stack[1, 2].astype(np.float64)]
    found = product(x, stack, sizes)
    np.testing.assert_allclose(found, np.concatenate(right), atol=2e-6 * np.abs(right[0]).max())
    halves = [product(x[:, at : at + 24], stack, sizes, part=part, parts=2) for part, at in enumerate((0, 24))]
    np.testing.assert_allclose(halves[0] + halves[1], found, atol=2e-6 * np.abs(right[0]).max())


@pytest.mark.slow
def test_a_row_has_its_bits_in_any_batch():
    stack, x = numbers(2, GROUPS, DEPTH, 20, seed=1), numbers(2 * ROWS, DEPTH)
    whole = product(x, stack, [0, 2 * ROWS, 0])
    for before, own, behind in ((3, 2, 0), (ROWS - 1, 2, 90), (0, 1, 0)):
        found = product(x[: before + own + behind], stack, [before, own, behind])
        np.testing.assert_array_equal(found[before : before + own], whole[before : before + own])


def test_one_kernel_serves_all_numbers_of_rows():
    stack = jax.ShapeDtypeStruct((4, 128, 2048, 256), jnp.bfloat16)
    sizes, texts = jax.ShapeDtypeStruct((128,), jnp.int32), set()
    for rows in (8, 512, 4096):
        x = jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16)
        texts |= {without_batch(text) for text in mosaic_texts(exact_grouped_matmul, x, stack, sizes)}
    assert len(texts) == 1
