"""Attention of a tile on keys in common is that of each row on its own copy of them, to the bit (float32, CPU)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.layers.contexts.blocks import attend_blocks, key_blocks
from axlearn_like.layers.contexts.cascade import Tile, attend_tile, tile_rows
from axlearn_like.layers.contexts.cells import Cell

UNUSED: Any = None  # kernels
KEYS = 256  # blocks of 64, 64 and 128


def cells(rng: np.random.Generator, rows: int, heads: int, width: int) -> list[Cell]:
    def one(size: int) -> Cell:
        k = rng.standard_normal((rows, heads, size * width), np.float32)
        return Cell(k, rng.standard_normal((rows, heads, size, width), np.float32))

    return [one(block.stop - block.start) for block in key_blocks(KEYS, width)]


def of_each_row(cell: Cell, rows: int) -> Cell:
    """Return keys in one piece, and values, of one row as those of some rows, whose keys are in blocks of 64."""
    _, heads, size, width = cell.v.shape
    k = cell.k.reshape(heads, width, size // 64, 64).transpose(0, 2, 1, 3).reshape(1, heads, -1)
    return Cell(*(np.broadcast_to(x, (rows, *x.shape[1:])) for x in (k, cell.v)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "window", "sinks"),
    [
        pytest.param((4, 2, 3, 32), None, False, id="plain"),
        pytest.param((3, 1, 5, 80), 50, True, id="window and sinks", marks=pytest.mark.full),
    ],
)
def test_shared_keys_change_no_bit(shape: tuple[int, int, int, int], window: int | None, sinks: bool):
    rows, heads, per_head, width = shape
    rng = np.random.default_rng(0)
    own, shared = cells(rng, rows, heads, width), cells(rng, 1, heads, width)
    weights = jnp.asarray(rng.standard_normal((heads, per_head), np.float32)) if sinks else None
    attention: Any = AttentionParams(ScoreRules(window=window), UNUSED, UNUSED, weights)
    q = rng.standard_normal((rows, 1, heads, per_head, width), np.float32)

    def tile(*arrays: Any) -> jax.Array:
        q, own, shared, needed, common, positions = arrays
        return attend_tile(q, Tile(tuple(own), tuple(shared)), needed, common, positions, attention)

    @jax.jit
    def alone(q: Any, own: list[Cell], positions: Any) -> jax.Array:
        return attend_blocks(q, [cell.blocks for cell in own], [cell.v for cell in own], positions, attention)

    jitted, far = jax.jit(tile), np.float32(np.nan)
    for needed, common in ((1, 0), (2, 1), (3, 0), (3, 2), (3, 3)):
        ends = (0, 64, 128, 256)
        positions = np.arange(ends[needed] - rows, ends[needed], dtype=np.int32)
        positions = np.maximum(positions, ends[common] - 1)[:, None]  # what rows have in common, all of them see
        same = [
            of_each_row(b, rows) if index < common else a for index, (a, b) in enumerate(zip(own, shared, strict=True))
        ]
        expected = np.asarray(alone(q, same[:needed], positions))
        # Places that are not to be read hold NaN.
        spoilt = [Cell(a.k * far, a.v * far) if not common <= index < needed else a for index, a in enumerate(own)]
        others = [Cell(a.k * far, a.v * far) if index >= common else a for index, a in enumerate(shared)]
        found = np.asarray(jitted(q, spoilt, others, jnp.int32(needed), jnp.int32(common), positions))
        assert found.tobytes() == expected.tobytes(), (needed, common)


def test_tiles_of_a_dispatch():
    assert [tile_rows(rows, 4) for rows in (4, 8, 10)] == [[4], [4, 4], [4, 4, 2]]
