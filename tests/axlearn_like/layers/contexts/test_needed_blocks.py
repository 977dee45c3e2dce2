"""Attention over as many blocks as are needed is that over these blocks alone, to the bit (float32, CPU)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.layers.contexts.blocks import attend_blocks, key_blocks
from axlearn_like.layers.contexts.window import attend_needed

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

UNUSED: Any = None  # kernels
ROWS, HEADS, PER_HEAD = 3, 2, 3


def in_float64(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, window: int, sinks: np.ndarray
) -> np.ndarray:
    """Return attention of q [r, c, k, q, h] at positions [r, c] over keys [r, k, h, s] and values [r, k, s, h]."""
    scores = np.einsum("rckqh,rkhs->rckqs", *(x.astype(np.float64) for x in (q, keys))) / np.sqrt(q.shape[-1])
    behind = positions[..., None] - np.arange(keys.shape[-1])
    scores = np.where(((behind >= 0) & (behind < window))[:, :, None, None], scores, -np.inf)
    weights = np.exp(scores)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks.astype(np.float64))[:, :, None]
    return np.einsum("rckqs,rksh->rckqh", weights / total, values.astype(np.float64))


@pytest.mark.parametrize(
    ("size", "width", "length", "ruled"),
    [
        pytest.param(352, 32, 1, False, id="a token", marks=pytest.mark.full),
        pytest.param(800, 160, 1, True, id="sums that begin within blocks, window and sinks"),
        pytest.param(544, 32, 20, False, id="drafts, more than 48 queries of a head", marks=pytest.mark.full),
        pytest.param(1600, 64, 1, True, id="blocks of several sums", marks=pytest.mark.full),
    ],
)
def test_blocks_that_are_not_needed_change_no_bit(size: int, width: int, length: int, ruled: bool):
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((ROWS, HEADS, width, size), np.float32)
    values = rng.standard_normal((ROWS, HEADS, size, width), np.float32)
    q = rng.standard_normal((ROWS, length, HEADS, PER_HEAD, width), np.float32)
    sinks = rng.standard_normal((HEADS, PER_HEAD), np.float32) if ruled else np.full((HEADS, PER_HEAD), -np.inf)
    rules = ScoreRules(window=90 if ruled else None)
    attention: Any = AttentionParams(rules, UNUSED, UNUSED, jnp.asarray(sinks) if ruled else None)
    blocks = key_blocks(size, width)

    @jax.jit
    def nested(q: Any, k: Any, v: Any, needed: Any, positions: Any) -> jax.Array:
        return attend_needed(q, k, v, needed, positions, attention)

    @jax.jit
    def alone(q: Any, k: Any, v: Any, positions: Any) -> jax.Array:
        return attend_blocks(q, k, v, positions, attention)

    for needed, last in enumerate(blocks, start=1):
        positions = (last.stop - 1 - 7 * np.arange(ROWS, dtype=np.int32)[:, None]) - np.arange(length)[::-1]
        k, v = [keys[..., block] for block in blocks], [values[:, :, block] for block in blocks]
        expected = np.asarray(alone(q, k[:needed], v[:needed], positions))
        # Places that are not to be read hold NaN.
        k, v = ([*x[:needed], *(part * np.float32(np.nan) for part in x[needed:])] for x in (k, v))
        found = np.asarray(nested(q, k, v, jnp.int32(needed), positions))
        assert found.tobytes() == expected.tobytes(), needed
        exact = in_float64(
            q, keys[..., : last.stop], values[:, :, : last.stop], positions, rules.window or size, np.asarray(sinks)
        )
        np.testing.assert_allclose(found, exact, atol=6e-6)


def test_a_block_has_one_product_with_its_keys_and_one_with_its_values():
    def program(size: int) -> str:
        blocks = key_blocks(size, 32)
        k = [jnp.zeros((ROWS, HEADS, 32, block.stop - block.start)) for block in blocks]
        q, positions = jnp.zeros((ROWS, 1, HEADS, PER_HEAD, 32)), jnp.zeros((ROWS, 1), jnp.int32)
        attention: Any = AttentionParams(ScoreRules(), UNUSED, UNUSED, None)
        v = [x.swapaxes(-1, -2) for x in k]

        @jax.jit
        def nested(q: Any, k: Any, v: Any, needed: Any, positions: Any) -> jax.Array:
            return attend_needed(q, k, v, needed, positions, attention)

        return nested.lower(q, k, v, 1, positions).as_text()

    for size in (64, 512, 2048):
        assert program(size).count("dot_general") == 2 * len(key_blocks(size, 32))
