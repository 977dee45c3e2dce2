"""Deterministic reductions: a row's sum or softmax is the same to the bit however many rows there are, on CPUs too.

XLA's CPU backend computes small arrays with other routines than large ones, and chooses by what it fused. Two remedies:
small arrays are padded with zero rows, and barriers keep an exponential from being fused into the sum over it.

On TPUs they are so within `use_numerics("exact")`, by a kernel (exact/row_sums.py).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axlearn_like.kernels.exact.scope import exact_kernels, on_own_rows
from mesh.rules import partition

_AT_ONCE = 256  # entries of a row that XLA adds at a time
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


def row_sum(x: jax.Array) -> jax.Array:
    """Return the sum over the last axis, kept with size 1."""
    if (kernels := exact_kernels()) is not None:
        return _by_kernel(x, squares=False, interpret=kernels.interpret)
    return _filled(lambda rows: jnp.sum(rows, axis=-1, keepdims=True), x)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Return the sum of x * x over the last axis, in float32, kept with size 1."""
    if (kernels := exact_kernels()) is not None:
        return _by_kernel(x, squares=True, interpret=kernels.interpret)
    return _filled(lambda rows: jnp.sum(rows * rows, axis=-1, keepdims=True), no_fuse(x.astype(jnp.float32)))


def exponentials(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return exp(x - max) over the last axis and its sum, kept with size 1: a softmax before its division."""
    weights = _exponentials(x)
    return weights, row_sum(weights)


def key_exponentials(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `exponentials` of scores of a window of keys, whose sum does not depend on the window's width on CPUs.

    A window is a multiple of 64 keys, and masked ones at its end have no weight. XLA's CPU code adds 256 entries of a
    row at a time, and what is left in another order: of 384 keys the last 128 were added otherwise than of 512.
    """
    weights = _exponentials(x)
    return weights, key_sum(weights)


def key_sum(weights: jax.Array, *others: jax.Array) -> jax.Array:
    """Return the sum of `key_exponentials`, of weights that are not fused with it; `others`: of keys behind."""
    parts = [weights, *others]
    width = sum(part.shape[-1] for part in parts)
    if width <= _AT_ONCE or width % _AT_ONCE == 0:
        return row_sum(_joined(*parts))

    def padded(*parts: jax.Array) -> jax.Array:
        rest = [(0, 0)] * (weights.ndim - 1) + [(0, -width % _AT_ONCE)]
        return row_sum(no_fuse(_joined(*parts[:-1], jnp.pad(parts[-1], rest))))

    return jax.lax.platform_dependent(*parts, cpu=padded, default=lambda *parts: row_sum(_joined(*parts)))


def _by_kernel(x: jax.Array, *, squares: bool, interpret: bool) -> jax.Array:
    """Return sums whose order does not depend on the number of rows, on TPUs."""
    from axlearn_like.kernels.exact.row_sums import exact_row_sums  # Pallas: slow to import

    def own(x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        return exact_row_sums(flat, squares=squares, interpret=interpret).reshape(*x.shape[:-1], 1)

    return on_own_rows(own, (x,))


def _joined(first: jax.Array, *others: jax.Array) -> jax.Array:
    # Not fused: a concatenation that is read by a sum is added in another order.
    return no_fuse(jnp.concatenate([first, *others], axis=-1)) if others else first


def _exponentials(x: jax.Array) -> jax.Array:
    peak = no_fuse(jnp.max(x, axis=-1, keepdims=True))
    return each(jnp.exp, x - peak)


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
