"""Deterministic reductions: a row's sum or softmax is the same to the bit however many rows there are, on CPUs too.

XLA's CPU backend computes small arrays with other routines than large ones, and chooses by what it fused. Two remedies:
small arrays are padded with zero rows, and barriers keep an exponential from being fused into the sum over it.

On TPUs they are so within `use_numerics("exact")`, by a kernel (exact/row_sums.py).
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axlearn_like.kernels.exact.parts import check_devices, parts_of, tree_sum
from axlearn_like.kernels.exact.scope import exact_kernels
from mesh.errors import UserError
from mesh.rules import partition
from mesh.sharding import entry_axes, full_spec

KEYS_AT_ONCE = 256  # entries of a row that XLA adds at a time
_FEW_AT_ONCE = 64  # the same of shorter rows
_LARGE = 4096  # entries from which on XLA sums rows as in large arrays
_VECTOR = 16  # entries of a row from which on XLA computes exponentials in whole vectors alone


def no_fuse[T](x: T) -> T:
    """Return x, which XLA on CPUs does not fuse with its users; no effect elsewhere."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def each(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `function`, of exponentials, of every entry: the same to the bit in arrays of all sizes, on CPUs too.

    Short rows are padded there: XLA rounds them by where they stand in an array, in a vector or in what is left.
    """
    width = x.shape[-1]
    if width >= _VECTOR:
        return no_fuse(function(x))

    def padded(x: jax.Array) -> jax.Array:
        wide = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, _VECTOR - width)])
        return no_fuse(function(no_fuse(wide)))[..., :width]

    return jax.lax.platform_dependent(x, cpu=padded, default=function)


def row_sum(x: jax.Array, axis: str | None = None) -> jax.Array:
    """Return the sum over the last axis, kept with size 1; `axis`: its logical name, where a mesh may shard it."""
    if (kernels := exact_kernels()) is not None:
        return _by_kernel(x, axis, squares=False, interpret=kernels.interpret)
    return _filled(lambda rows: jnp.sum(rows, axis=-1, keepdims=True), x)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Return the sum of x * x over the last axis, in float32, kept with size 1."""
    if (kernels := exact_kernels()) is not None:
        return _by_kernel(x, None, squares=True, interpret=kernels.interpret)
    return _filled(lambda rows: jnp.sum(rows * rows, axis=-1, keepdims=True), no_fuse(x.astype(jnp.float32)))


def exponentials(x: jax.Array, axis: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Return exp(x - max) over the last axis and its sum (`row_sum`): a softmax before its division."""
    weights = each(jnp.exp, x - no_fuse(jnp.max(x, axis=-1, keepdims=True)))
    return weights, row_sum(weights, axis)


def key_exponentials(*scores: jax.Array) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Return `exponentials` of scores of blocks of keys, their sum (on CPUs the same however many follow), and peak.

    Masked keys at the end have no weight. XLA's CPU code adds 256 entries of a row at a time, and what is left in
    another order: of 384 keys the last 128 were added otherwise than of 512. Up to 256, rows of whole 64s are alike.
    """
    scores = tuple(map(no_fuse, scores))  # XLA does not compute exponentials in vectors where it masks scores as well
    peaks = [no_fuse(jnp.max(part, axis=-1, keepdims=True)) for part in scores]
    peak = peaks[0] if len(peaks) == 1 else no_fuse(functools.reduce(jnp.maximum, peaks))
    weights = [key_weights(part, peak) for part in scores]
    return weights, key_sum(*weights), peak


def key_weights(scores: jax.Array, peak: jax.Array) -> jax.Array:
    """Return the exponentials of one block's scores, which are fused with nothing, behind the largest of all blocks."""
    behind = scores - peak
    # XLA does not compute those of rows of 32 entries in vectors, either, unless they are alone.
    return each(jnp.exp, no_fuse(behind) if scores.shape[-1] < _FEW_AT_ONCE else behind)


def key_sum(*weights: jax.Array) -> jax.Array:
    """Return the sum of the weights of `key_exponentials`, which are not fused with it, over all blocks.

    On CPUs 256 at a time, from the first key on, whatever the blocks.
    """

    def in_pieces(*weights: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, key_sums(*weights))

    def plain(first: jax.Array, *others: jax.Array) -> jax.Array:
        return row_sum(jnp.concatenate([first, *others], axis=-1) if others else first)

    return jax.lax.platform_dependent(*weights, cpu=in_pieces, default=plain)


def key_sums(*weights: jax.Array) -> list[jax.Array]:
    """Return the sums of each 256 keys, which `key_sum` adds up on CPUs."""
    return [row_sum(_side_by_side(parts, size)) for parts, size in _pieces(weights)]


def _pieces(weights: Sequence[jax.Array]) -> Iterator[tuple[list[jax.Array], int]]:
    """Yield the parts of each 256 keys, and how many entries they are padded to: the last ones to whole 64s of few."""
    width, start = sum(part.shape[-1] for part in weights), 0
    pieces: list[list[jax.Array]] = [[] for _ in range(0, width, KEYS_AT_ONCE)]
    for part in weights:
        stop = start + part.shape[-1]
        for index in range(start // KEYS_AT_ONCE, -(-stop // KEYS_AT_ONCE)):
            first, end = max(start, index * KEYS_AT_ONCE), min(stop, (index + 1) * KEYS_AT_ONCE)
            pieces[index].append(part[..., first - start : end - start])
        start = stop
    for parts in pieces:
        yield parts, KEYS_AT_ONCE if width > KEYS_AT_ONCE else width + -width % _FEW_AT_ONCE


def _by_kernel(x: jax.Array, axis: str | None, *, squares: bool, interpret: bool) -> jax.Array:
    """Return sums whose order depends neither on the number of rows nor on who has the entries, on TPUs."""
    from axlearn_like.kernels.exact.row_sums import exact_row_sums  # Pallas: slow to import

    parts = 1 if axis is None else parts_of(x.shape[-1])
    run = functools.partial(exact_row_sums, squares=squares, interpret=interpret)

    def own(x: jax.Array, parts: int) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        size = x.shape[-1] // parts
        sums = tree_sum(lambda part: run(flat if parts == 1 else flat[:, part * size : (part + 1) * size]), parts)
        return sums.reshape(*x.shape[:-1], 1)

    if (spec := full_spec(x)) is None:
        return own(x, parts)
    names = entry_axes(spec[-1])
    devices = check_devices(axis or "rows", {name: jax.typeof(x).sharding.mesh.shape[name] for name in names})
    if devices > parts:
        raise UserError(
            f'numerics="exact": a sum over {axis or "unnamed"} entries has {parts} parts, which {devices} devices '
            f"({', '.join(names)}) cannot share; expected a size that a larger power of two divides, or whole rows"
        )

    def shared(x: jax.Array) -> jax.Array:
        sums = own(x, parts // devices)
        if devices == 1:
            return sums
        of_devices = jax.lax.all_gather(sums, names)
        return tree_sum(lambda device: of_devices[device], devices)

    return jax.shard_map(shared, in_specs=spec, out_specs=PartitionSpec(*spec[:-1], None), check_vma=False)(x)


def _side_by_side(parts: Sequence[jax.Array], width: int) -> jax.Array:
    """Return arrays of numbers from 0 on side by side on the last axis, and zeros behind them up to `width`.

    As a sum of padded arrays: XLA's CPU backend compiles a concatenation for each place where it stands. Not fused: a
    sum of what it puts together would be taken in another order.
    """
    if len(parts) == 1:
        (x,) = parts
        return x if x.shape[-1] == width else no_fuse(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]))
    first, second = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    left, right = (_side_by_side(some, sum(x.shape[-1] for x in some)) for some in (first, second))
    rest = [(0, 0)] * (left.ndim - 1)
    start, end = left.shape[-1], left.shape[-1] + right.shape[-1]
    return no_fuse(jnp.pad(left, [*rest, (0, width - start)]) + jnp.pad(right, [*rest, (start, width - end)]))


def _filled(total: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `total` of the rows of x, computed as for a large array."""
    if x.size >= _LARGE:
        return no_fuse(total(no_fuse(x)))
    width = x.shape[-1]
    rows = x.size // width
    flat = jnp.reshape(x, (rows, width), out_sharding=partition(None, None))
    filled = jnp.pad(flat, [(0, -(-_LARGE // width) - rows), (0, 0)])
    sums = total(no_fuse(filled))[:rows]
    like = None if jax.sharding.get_abstract_mesh().empty else PartitionSpec(*jax.typeof(x).sharding.spec[:-1], None)
    sums = jnp.reshape(sums, (*x.shape[:-1], 1), out_sharding=partition(*[None] * x.ndim))
    return sums if like is None else jax.sharding.reshard(sums, like)
