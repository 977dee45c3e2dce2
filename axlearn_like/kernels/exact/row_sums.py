"""Sums over the last axis in fixed tiles: of norms and of softmaxes over a vocabulary.

XLA's own reductions choose their tiles by the shape and by what is fused with them. Here a row is added up in tiles of
columns, ascending, in float32: first the columns of each lane of a register, then the lanes. Tiles depend on the width
of rows, and not on their number.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesh.cost.expected import costs

LANES = 128  # columns of a register
_COLUMNS = 4096  # limit of a tile's columns
_ENTRIES = 1 << 17  # elements of a tile


def exact_row_sums(x_rd: jax.Array, *, squares: bool = False, interpret: bool = False) -> jax.Array:
    """Return the sum of each row, or of its squares, float32 [r, 1], on one device.

    Args:
        x_rd: float32 or bfloat16.
        squares: squares of the entries, in float32.
    """
    rows, width = x_rd.shape
    columns = min(_COLUMNS, -(-width // LANES) * LANES)
    of_tile = max(16, _ENTRIES // columns // 16 * 16)
    x_rd = jnp.pad(x_rd, [(0, -rows % of_tile), (0, columns - width if width < columns else 0)])
    sums = pl.pallas_call(
        functools.partial(_kernel, squares=squares, width=width),
        grid=(len(x_rd) // of_tile, pl.cdiv(width, columns)),
        in_specs=[pl.BlockSpec((of_tile, columns), lambda r, d: (r, d))],
        out_specs=pl.BlockSpec((of_tile, 1), lambda r, d: (r, 0)),
        out_shape=jax.ShapeDtypeStruct((len(x_rd), 1), jnp.float32),
        scratch_shapes=[pltpu.VMEM((of_tile, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="exact_row_sums",
    )
    with costs(flops=0, bytes=x_rd.size * x_rd.dtype.itemsize):
        return sums(x_rd)[:rows]


def _kernel(x: Any, out: Any, sums: Any, *, squares: bool, width: int) -> None:
    """Add one tile to the sums of its rows."""
    tile, columns = pl.program_id(1), x.shape[1]

    @pl.when(tile == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    total = sums[...]
    for begin in range(0, columns, LANES):
        values = x[:, begin : begin + LANES].astype(jnp.float32)
        if width % columns:  # values read past the end are arbitrary
            lanes = tile * columns + begin + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
            values = jnp.where(lanes < width, values, 0.0)
        total += values * values if squares else values
    sums[...] = total

    @pl.when(tile == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = jnp.sum(sums[...], axis=1, keepdims=True)
