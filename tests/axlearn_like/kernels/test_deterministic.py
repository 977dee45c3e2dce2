"""Sums that do not depend on the shape they are taken in, to the bit."""

import jax
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import MASKED
from axlearn_like.kernels.deterministic import key_exponentials

WIDEST = 1024


@pytest.mark.parametrize("rows", [6, 48])
def test_a_softmax_over_keys_is_the_same_in_any_window(rows: int):
    scores = 3 * np.random.default_rng(0).standard_normal((rows, WIDEST)).astype(np.float32)
    compiled = jax.jit(key_exponentials)
    for width in (64, 192, 384, 448, 704, 960):
        live = np.where(np.arange(WIDEST) < width - 11, scores, MASKED)
        weights, total = compiled(live[:, :width])
        expected, expected_total = compiled(live)
        np.testing.assert_array_equal(weights, expected[:, :width])
        np.testing.assert_array_equal(total, expected_total)
