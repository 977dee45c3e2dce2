"""Sums that do not depend on the shape they are taken in, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import MASKED
from axlearn_like.kernels.deterministic import each, exponentials, key_exponentials, row_sum

WIDEST = 1024


@pytest.mark.slow
@pytest.mark.parametrize("rows", [6, pytest.param(48, marks=pytest.mark.full)])
def test_a_softmax_over_keys_is_the_same_in_any_window(rows: int):
    """One block or some, with keys behind that have no weight."""
    scores = 3 * np.random.default_rng(0).standard_normal((rows, WIDEST)).astype(np.float32)
    compiled = jax.jit(key_exponentials)
    for width in (64, 192, 384, 448, 704, 960):
        live = np.where(np.arange(WIDEST) < width - 11, scores, MASKED)
        (expected,), expected_total, expected_peak = compiled(live)
        for cuts in ((), (64, 128, 256)):
            parts = np.split(live[:, :width], [cut for cut in cuts if cut < width], axis=1)
            weights, total, peak = compiled(*parts)
            np.testing.assert_array_equal(np.concatenate(weights, axis=1), expected[:, :width])
            np.testing.assert_array_equal(total, expected_total)
            np.testing.assert_array_equal(peak, expected_peak)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, pytest.param(4, marks=pytest.mark.full), 8])
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_exponentials_of_short_rows_are_the_same_in_any_batch(name: str, width: int):
    """The scores of a few experts, the sinks of heads: tokens alone, a few with drafts each, whole rows."""
    scores = np.random.default_rng(0).standard_normal((256, 8, width)).astype(np.float32)
    compiled = jax.jit({"softmax": lambda x: exponentials(x)[0], "sigmoid": lambda x: each(jax.nn.sigmoid, x)}[name])
    whole = np.asarray(compiled(scores))
    for rows, length in ((1, 1), (4, 1), (4, 2), (4, 4)):
        parts = [compiled(scores[first : first + rows, :length]) for first in range(0, 256, rows)]
        np.testing.assert_array_equal(np.concatenate(parts), whole[:, :length])


@pytest.mark.parametrize("width", [3, pytest.param(4, marks=pytest.mark.full)])
def test_sums_of_short_rows_are_the_same_in_any_batch_whatever_made_them(width: int):
    """The weights of a token's experts, from a large array and from a small one."""
    scores = np.random.default_rng(0).random((2048, 8)).astype(np.float32)

    @jax.jit
    def compiled(scores: jax.Array) -> jax.Array:
        chosen = jax.lax.top_k(scores, width)[1][..., None] == jnp.arange(8)
        return row_sum(jnp.sum(jnp.where(chosen, scores[:, None], 0.0), axis=-1))

    parts = [compiled(part) for part in np.split(scores, 32)]
    np.testing.assert_array_equal(np.concatenate(parts), compiled(scores))
