"""A window that ends within a block of keys has the sums of a longer one, to the bit (float32, CPU)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.layers.contexts.blocks import attend_blocks, key_blocks
from axlearn_like.layers.contexts.cells import Cell, fill, make_window
from axlearn_like.layers.contexts.paged import make_pool

UNUSED: Any = None  # kernels
FULL = pytest.mark.full


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


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 20], ids=["a token", "drafts, more than 48 queries of a head"])
@pytest.mark.parametrize(("size", "width"), [(96, 32), *(pytest.param(*s, marks=FULL) for s in ((32, 32), (352, 80)))])
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


@pytest.mark.slow
def test_windows_hold_the_pages_of_their_rows_as_far_as_they_are_needed():
    rng, page_size, heads, width, size = np.random.default_rng(0), 16, 2, 32, 352  # cells of 64, 64, 128 and 96 keys
    groups, pages = (2, 3), size // page_size
    shapes = make_pool(
        layers=1, pages=5 * pages + 1, page_size=page_size, kv_heads=heads, head_dim=width, dtype=np.float32
    )
    pool = {name: rng.standard_normal(x.shape, np.float32) for name, x in shapes.items()}
    table = rng.permutation(np.arange(1, 5 * pages + 1, dtype=np.int32)).reshape(5, pages)
    lengths, needed = np.array([5, 300, 352, 200, 257], np.int32), jnp.array([2, 4])
    empty = [make_window(rows, size, kv_heads=heads, head_dim=width, dtype=np.float32) for rows in groups]
    run = jax.jit(lambda windows, pool, table: fill(windows, pool, [table], jnp.asarray(lengths), needed, [None]))
    (filled,) = run([empty], pool, table)

    k = pool["k"][table].transpose(0, 2, 3, 1, 4).reshape(5, heads, width, size)
    v = pool["v"][table].transpose(0, 2, 1, 3, 4).reshape(5, heads, size, width)
    v = np.where((np.arange(size) < lengths[:, None])[:, None, :, None], v, 0)
    first = 0
    for rows, cells, count in zip(groups, filled, needed, strict=True):
        own = slice(first, first := first + rows)
        for cell, expected in zip(cells[:count], cells_of(k[own], v[own], size), strict=False):
            np.testing.assert_array_equal(cell.k, expected.k)
            np.testing.assert_array_equal(cell.v, expected.v)
        assert not any(np.any(cell.k) or np.any(cell.v) for cell in cells[count:])
