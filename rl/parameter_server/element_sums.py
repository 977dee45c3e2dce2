"""Sums over the elements of an array that tell contents apart, on a device and on the host alike."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 4  # 32-bit sums per array
_COLUMNS = 128  # least elements of a row, where an array has as many: of the hashes of rows there are few


def element_sums[A: (jax.Array, np.ndarray)](part: A, shape: list[int], starts: list[Any]) -> A:
    """Return the sums over a part of an array, uint32 [LANES]: traced, or of numpy.

    The sums of disjoint parts add up to those of the whole.

    Args:
        shape: shape of the whole array.
        starts: first index of the part in each dimension.
    """
    bits = _bits(part)
    place, weight = _places(np if isinstance(part, np.ndarray) else jnp, part.shape, shape, starts)
    first = _mix(bits ^ place, 0x7FEB352D, 0x846CA68B)
    second = (first ^ (first >> 15)) * np.uint32(0xC2B2AE3D)
    hashes = (first, first * weight, second, second * weight)  # the weights are odd: no bit is lost in a product
    if isinstance(part, np.ndarray):
        return np.stack([one.sum(dtype=np.uint32) for one in hashes])
    # One reduction of four operands: XLA vectorises it for CPUs, but not four of one operand each (15 times slower).
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
    return jnp.stack(lax.reduce(hashes, (np.uint32(0),) * LANES, add, tuple(range(bits.ndim))))


def _bits(array: Any) -> Any:
    """Return the bits of every element, uint32."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(np.int32).astype(np.uint32)  # signed integers are sign-extended
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    if isinstance(array, np.ndarray):
        return array.view(unsigned).astype(np.uint32)
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _places(xp: Any, part: tuple[int, ...], shape: list[int], starts: list[Any]) -> tuple[Any, Any]:
    """Return two words for each element that depend on its index in the whole array, the second of them odd.

    An index is that of a row and that of a column in it, modulo 2^32 each. Either is hashed by itself: the hashes are
    small arrays that are computed once, so an element costs two operations. Two elements of different rows and columns
    may share one of their words, but hardly both.
    """
    first_column = next((axis for axis in reversed(range(len(shape))) if math.prod(shape[axis:]) >= _COLUMNS), 0)
    rows = _mix(_index(xp, part, shape, starts, range(first_column)), 0x9E3779B1, 0x85EBCA77)
    columns = _mix(_index(xp, part, shape, starts, range(first_column, len(shape))), 0x85EBCA6B, 0xC2B2AE35)
    if xp is jnp and max(rows.size, columns.size) * 16 <= math.prod(part):
        rows, columns = lax.optimization_barrier((rows, columns))  # XLA would hash them again for each element
    return xp.broadcast_to(rows ^ columns, part), xp.broadcast_to((rows + columns) | 1, part)


def _index(xp: Any, part: tuple[int, ...], shape: list[int], starts: list[Any], axes: range) -> Any:
    """Return the index over some axes of the whole array, uint32; of size 1 along the others."""
    index = xp.zeros((1,) * len(shape), xp.uint32)
    for axis in axes:
        own = tuple(part[axis] if axis == other else 1 for other in range(len(shape)))
        stride = math.prod(shape[axis + 1 : axes.stop])
        along = xp.arange(part[axis], dtype=xp.uint32).reshape(own) + xp.uint32(starts[axis])
        index = index + along * np.uint32(stride % 2**32)
    return index


def _mix[A: (jax.Array, np.ndarray)](x: A, first: int, second: int) -> A:
    """Mix 32-bit words: a bijection in which every input bit affects every output bit.

    The form, and 0x85EBCA6B with 0xC2B2AE35, are of MurmurHash3's finalizer (A. Appleby); 0x7FEB352D with 0x846CA68B of
    C. Wellons' hash prospector ("lowbias32").
    """
    x = (x ^ (x >> 16)) * np.uint32(first)
    x = (x ^ (x >> 15)) * np.uint32(second)
    return x ^ (x >> 16)
