"""Truncated and whitened factors of a matrix, against singular vectors in float64 by numpy."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.layers.wrappers.low_rank.matrices import factorise, smaller_rank

pytestmark = pytest.mark.numerics

SHAPES = [(24, 40), (40, 24), (16, 16)]


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def inputs_of(size: int) -> Any:
    """200 tokens whose inputs are correlated, and of sizes that differ a hundredfold."""
    return random(200, size, seed=1) @ random(size, size, seed=2) * np.logspace(-1, 1, size)


def error(x: np.ndarray, weight: np.ndarray, factors: tuple[jax.Array, jax.Array]) -> float:
    a, b = (np.asarray(one, np.float64) for one in factors)
    return float(np.linalg.norm(x @ (weight - a @ b)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_the_discarded_singular_values(shape):
    """Plain in the norm of the matrix, whitened in that of its outputs, and each the best in its own."""
    weight, x, one = random(*shape), inputs_of(shape[0]), np.eye(shape[0])
    with jax.enable_x64(True):
        for rank in (1, 7, 15):
            plain, whitened = factorise(weight, rank), factorise(weight, rank, x, damping=0.0)
            values, of_outputs = (np.linalg.svd(m, compute_uv=False)[rank:] for m in (weight, x @ weight))
            assert error(one, weight, plain) == pytest.approx(np.linalg.norm(values), rel=1e-9)
            assert error(x, weight, whitened) == pytest.approx(np.linalg.norm(of_outputs), rel=1e-8)
            assert error(x, weight, whitened) < 0.9 * error(x, weight, plain)
            assert error(one, weight, plain) < error(one, weight, whitened)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_at_full_rank_the_product_is_the_matrix(shape):
    weight, rank = random(*shape).astype(np.float32), min(shape)
    few = inputs_of(shape[0])[:5].astype(np.float32)  # fewer tokens than inputs, whose Gram matrix is singular
    for inputs, most in ((None, 2e-5), (few, 2e-3)):
        a, b = factorise(weight, rank, inputs)
        assert (a.shape, b.shape) == ((shape[0], rank), (rank, shape[1]))
        np.testing.assert_allclose(np.asarray(a, np.float64) @ np.asarray(b, np.float64), weight, atol=most)


def test_the_rank_of_a_share_is_the_largest_whose_factors_fit():
    for inputs, outputs in ((96, 384), (384, 96), (100, 7)):
        rank = smaller_rank(inputs, outputs, 0.5)
        assert rank * (inputs + outputs) <= inputs * outputs / 2 < (rank + 1) * (inputs + outputs)
    assert smaller_rank(4096, 14336, 0.5) == 1536 and smaller_rank(4096, 1024, 0.3) == 128
