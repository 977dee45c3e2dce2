"""A gated feed-forward network of which each matrix is two factors, without its hidden units in memory, for TPUs.

Low rank makes weights smaller, not activations: the hidden units [tokens, hidden], which are 3.5 times as wide as the
model, are still written and read, beside what is in rank space. Here they live in fast memory, a tile at a time, as in
FlashSVD (Shao et al. 2025, arXiv 2508.01506):

    for a block of tokens:
        for a tile of hidden units:
            sum += combine(low_gate gate_b, low_up up_b) down_a

with `low_gate = x gate_a`, `low_up = x up_a` before, and the product of the sum with `down_b` behind, which XLA
computes: all three are in rank space or as wide as the model. The sum [block, rank] stays in fast memory, in float32,
over all tiles, which that of TPUs has room for, so nothing is computed twice. There is no backward pass.

Shape letters: n tokens, d model width, f hidden units, r rank (each matrix has its own).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from axlearn_like.kernels.paged_attention.rows import LANES
from mesh.cost.expected import costs
from mesh.rules import axis_sizes
from mesh.sharding import varying

TOKENS = 512  # tokens of a block
UNITS = 512  # hidden units of a tile, at most
_VMEM = 96 << 20  # bytes that the kernel may use of fast memory, as that of the policy's head

Combine = Callable[[jax.Array, jax.Array], jax.Array]  # elementwise function of gate and up


class GLUFactors(NamedTuple):
    """The factors of the three matrices: [d, r] and [r, f] of gate and up, [f, r] and [r, d] of down."""

    gate_a: Any
    gate_b: Any
    up_a: Any
    up_b: Any
    down_a: Any
    down_b: Any


def fits(factors: GLUFactors, tokens: int) -> bool:
    """Return True if the kernel takes such factors, and so many tokens make it worth while.

    A kernel reads no slice of a stack of layers: factors [r, f] are copied out of it, which XLA's own products do not
    need. So there must be more hidden units than numbers of these.
    """
    units = factors.gate_b.shape[1] // math.prod(axis_sizes("hidden").values())
    return tokens >= _ranks(factors) and units % LANES == 0 and _bytes(factors, _tile(units)) <= _VMEM


def by_kernel(x_nd: jax.Array, factors: GLUFactors, combine: Combine, *, interpret: bool = False) -> jax.Array:
    """Return [n, d]; tokens are on every device of the mesh, hidden units may be sharded.

    Args:
        x_nd: activations, to whose type factors are cast.
        combine: makes hidden units of gate and up.
    """
    found = GLUFactors(*(one.astype(x_nd.dtype) for one in factors))
    low_gate, low_up = x_nd @ found.gate_a, x_nd @ found.up_a
    arrays = low_gate, low_up, found.gate_b, found.up_b, found.down_a
    run = functools.partial(_rank_space, combine=combine, interpret=interpret)
    axes = tuple(name for name, size in axis_sizes("hidden").items() if size > 1)
    if axes:
        each = PartitionSpec(), PartitionSpec(), *[PartitionSpec(None, axes)] * 2, PartitionSpec(axes)
        summed = lambda *parts: jax.lax.psum(run(*parts), axes).astype(x_nd.dtype)  # noqa: E731
        return jax.shard_map(summed, in_specs=each, out_specs=PartitionSpec())(*arrays) @ found.down_b
    return run(*arrays).astype(x_nd.dtype) @ found.down_b


def _rank_space(
    low_gate: jax.Array,
    low_up: jax.Array,
    gate_rf: jax.Array,
    up_rf: jax.Array,
    down_fr: jax.Array,
    *,
    combine: Combine,
    interpret: bool,
) -> jax.Array:
    """Return combine(low_gate gate, low_up up) down, [n, r], in float32 where it is summed over devices."""
    (count, units), rank = (len(low_gate), gate_rf.shape[1]), down_fr.shape[1]
    tile, missing = _tile(units), -count % TOKENS
    low_gate, low_up = (jnp.pad(one, [(0, missing), (0, 0)]) for one in (low_gate, low_up))
    blocks, tiles, axes = (count + missing) // TOKENS, units // tile, varying(gate_rf)
    kind: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
    dtype = jnp.float32 if axes else low_gate.dtype

    def tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((TOKENS, width), lambda n, _: (n, 0))

    def columns(one: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((one.shape[0], tile), lambda _, f: (0, f))

    sums = pl.pallas_call(
        functools.partial(_kernel, combine=combine, tiles=tiles),
        grid=(blocks, tiles),
        in_specs=[
            *(tokens(one.shape[1]) for one in (low_gate, low_up)),
            *(columns(one) for one in (gate_rf, up_rf)),
            pl.BlockSpec((tile, rank), lambda _, f: (f, 0)),
        ],
        out_specs=tokens(rank),
        out_shape=jax.ShapeDtypeStruct((count + missing, rank), dtype, **kind),
        scratch_shapes=[pltpu.VMEM((TOKENS, rank), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM),
        interpret=pltpu.InterpretParams(uninitialized_memory="nan") if interpret else False,
        name="low_rank_ffn",
    )
    weights = gate_rf.size + up_rf.size + down_fr.size
    moved = blocks * weights + low_gate.size + low_up.size + (count + missing) * rank
    with costs(flops=2 * (count + missing) * weights, bytes=moved * gate_rf.dtype.itemsize):
        return sums(low_gate, low_up, gate_rf, up_rf, down_fr)[:count]


def _kernel(*refs: Any, combine: Combine, tiles: int) -> None:
    low_gate, low_up, gate, up, down, out, acc = refs
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    both = ((low_gate, gate), (low_up, up))
    wide = (jnp.dot(low[...], matrix[...], preferred_element_type=jnp.float32) for low, matrix in both)
    hidden = combine(*wide).astype(down.dtype)
    acc[...] += jnp.dot(hidden, down[...], preferred_element_type=jnp.float32)

    @pl.when(tile == tiles - 1)
    def _() -> None:
        out[...] = acc[...].astype(out.dtype)


def _tile(units: int) -> int:
    """Return the most hidden units of a tile that divide them all, a multiple of 128."""
    return next((tile for tile in range(UNITS, 0, -LANES) if units % tile == 0), LANES)


def _bytes(factors: GLUFactors, tile: int) -> int:
    """Return the fast memory of blocks, which are there twice, of the sum, and of a tile of hidden units."""
    blocks = 2 * factors.gate_b.dtype.itemsize * (TOKENS + tile) * _ranks(factors)
    return blocks + 4 * TOKENS * (factors.down_a.shape[1] + 3 * tile)


def _ranks(factors: GLUFactors) -> int:
    return len(factors.gate_b) + len(factors.up_b) + factors.down_a.shape[1]
