"""A window that ends within a block of keys has the sums of a longer one, to the bit (float32, CPU)."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.layers.contexts.blocks import attend_blocks, key_blocks
from axlearn_like.layers.contexts.window import Cell, make_window

UNUSED: Any = None  # kernels


def cells_of(keys: np.ndarray, values: np.ndarray, size: int) -> list[Cell]:
    """Return the first keys [r, k, h, s] and values [r, k, s, h] as a window holds them."""
    rows, heads, width, _ = keys.shape
    cells = []
    for block, empty in zip(
        key_blocks(size, width), make_window(rows, size, kv_heads=heads, head_dim=width, dtype=np.float32), strict=True
    ):
        at_once = empty.blocks.shape[-1]
        k = keys[..., block].reshape(rows, heads, width, -1, at_once).transpose(0, 1, 3, 2, 4)
        cells.append(Cell(k.reshape(empty.k.shape), values[:, :, block]))
    return cells


@pytest.mark.parametrize("length", [1, 20], ids=["a token", "drafts, more than 48 queries of a head"])
@pytest.mark.parametrize(("size", "width"), [(32, 32), (96, 32), (352, 80)])
def test_a_window_of_half_blocks_changes_no_bit(size: int, width: int, length: int):
    rng, rows, heads, per_head = np.random.default_rng(0), 4, 2, 3
    longer = -(-size // 64) * 64 + 64
    keys = rng.standard_normal((rows, heads, width, longer), np.float32)
    values = rng.standard_normal((rows, heads, longer, width), np.float32)
    q = rng.standard_normal((rows, length, heads, per_head, width), np.float32)
    positions: Any = (size - rows + np.arange(rows))[:, None] - np.arange(length)[::-1]
    attention: Any = AttentionParams(ScoreRules(), UNUSED, UNUSED, None)

    def alone(q: Any, cells: list[Cell]) -> jax.Array:
        return attend_blocks(q, [cell.blocks for cell in cells], [cell.v for cell in cells], positions, attention)

    def whole(q: Any, keys: Any, values: Any) -> jax.Array:
        blocks = key_blocks(longer, width)
        parts = [keys[..., block] for block in blocks], [values[:, :, block] for block in blocks]
        return attend_blocks(q, *parts, positions, attention)

    found = np.asarray(jax.jit(alone)(q, cells_of(keys, values, size)))
    assert found.tobytes() == np.asarray(jax.jit(whole)(q, keys, values)).tobytes()
