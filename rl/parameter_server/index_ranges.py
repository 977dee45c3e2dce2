"""Index ranges: which part of a tensor a device holds or needs, and which held parts make up a needed one.

An index range is one half-open interval [start, stop) for each dimension: what `jax.Shard.index` says in slices, and a
TensorStore `IndexDomain` without labels. They are plain tuples, because they are dict keys, travel as JSON and are
compared by the thousand. Intersections are TensorStore's. Building an `IndexDomain` (1.6 us) costs more than
intersecting two (0.4 us), so they are cached: a model has few distinct ones, since tensors of one shape and sharding
share theirs.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding

from rl.parameter_server.errors import WeightsError

if TYPE_CHECKING:
    import tensorstore as ts

type IndexRange = tuple[tuple[int, int], ...]  # [start, stop) by dimension; () for a scalar


def whole(shape: Sequence[int]) -> IndexRange:
    """Return the index range of a whole tensor."""
    return tuple((0, int(size)) for size in shape)


def shape_of(index_range: IndexRange) -> tuple[int, ...]:
    """Return the shape of the array that holds an index range."""
    return tuple(stop - start for start, stop in index_range)


def volume(index_range: IndexRange) -> int:
    """Return the number of elements: 1 for a scalar, 0 for an empty range."""
    return _domain(index_range).size


def describe(index_range: IndexRange) -> str:
    """Format the index range as one would index with it: "[0:2, 4:8]"."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in index_range) + "]"


def intersect(a: IndexRange, b: IndexRange) -> IndexRange | None:
    """Return the intersection, or None if it is empty. Test with `is None`: the index range of a scalar, (), is false.

    Raises:
        WeightsError: the index ranges have different numbers of dimensions.
    """
    if len(a) != len(b):
        raise WeightsError(f"index ranges {describe(a)} and {describe(b)} have different numbers of dimensions")
    both = _domain(a).intersect(_domain(b))
    return tuple(zip(both.inclusive_min, both.exclusive_max, strict=True)) if both.size else None


def within(index_range: IndexRange, outer: IndexRange) -> bool:
    """Return True if the index range lies in `outer`; equal bounds count as inside."""
    return len(index_range) == len(outer) and all(
        o[0] <= b[0] and b[1] <= o[1] for b, o in zip(index_range, outer, strict=True)
    )


def slices(index_range: IndexRange, inside: IndexRange) -> tuple[slice, ...]:
    """Return the slices of `index_range` relative to the array that holds the index range `inside`.

    Index with (*slices, ...), so that a scalar stays a view, too.

    Raises:
        WeightsError: the one does not lie in the other.
    """
    if not within(index_range, inside):
        raise WeightsError(f"index range {describe(index_range)} does not lie in {describe(inside)}")
    return tuple(slice(b[0] - i[0], b[1] - i[0]) for b, i in zip(index_range, inside, strict=True))


def owned_shards(array: jax.Array, turn: int = 0) -> list[tuple[IndexRange, jax.Array]]:
    """Return the shards that this process has to push: one replica of every distinct index range of the array.

    Args:
        array: with any sharding; all processes that hold parts of it, taken together, own each element once.
        turn: which of several replicas sends, modulo their number and the same in all processes. With another turn
            for each tensor, processes that hold the same share the work.

    Returns:
        Index ranges and the single-device arrays that hold them.
    """
    index_ranges = [
        index_range_of(index, array.shape) for index in array.sharding.devices_indices_map(array.shape).values()
    ]
    sender = turn % (
        len(index_ranges) // len(set(index_ranges))
    )  # a sharding gives every index range to equally many devices
    shards = [shard for shard in array.addressable_shards if shard.replica_id == sender]
    return [(index_range_of(shard.index, array.shape), shard.data) for shard in shards]


def needed_index_ranges(sharding: Sharding, shape: Sequence[int]) -> dict[IndexRange, list[Any]]:
    """Return the distinct index ranges of a tensor that local devices need, each with its devices."""
    needed: dict[IndexRange, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        needed.setdefault(index_range_of(index or (), shape), []).append(device)
    return needed


def check_cover(name: str, shape: Sequence[int], index_ranges: Iterable[IndexRange]) -> None:
    """Check that index ranges have each element of the tensor once (WeightsError: names the first that is wrong)."""
    tensor, kept = whole(shape), []
    for index_range in index_ranges:
        if not within(index_range, tensor) or any(stop < start for start, stop in index_range):
            raise WeightsError(f"tensor {name}: shard {describe(index_range)} is outside its shape {tuple(shape)}")
        if volume(index_range):
            kept.append(index_range)
    overlap = _first_overlap(kept)
    if overlap is not None:
        first, second = (kept[i] for i in overlap)
        raise WeightsError(
            f"tensor {name} of shape {tuple(shape)}: shards {describe(first)} and {describe(second)} overlap"
        )
    if sum(map(volume, kept)) < volume(tensor):  # no overlaps: elements are counted
        holes = [tensor]
        for index_range in sorted(kept):
            holes = [rest for hole in holes for rest in _without(hole, index_range)]
        raise WeightsError(f"tensor {name} of shape {tuple(shape)}: no shard holds {describe(min(holes))}")


def covering(index_range: IndexRange, held: Sequence[IndexRange]) -> list[IndexRange]:
    """Return disjoint parts of `index_range`, each inside one of the held index ranges, that together cover it.

    One part if a single held index range contains it; otherwise the held index range with the largest overlap comes
    first. The held index ranges may overlap and repeat, as those of several shard servers do.

    Returns:
        [] if the held index ranges lack some of it, and for an index range without elements that none of them encloses.
    """
    distinct = tuple(dict.fromkeys(held))
    if index_range in distinct:
        return [index_range]
    starts, stops = _ends(distinct, len(index_range))
    low, high = _ends((index_range,), len(index_range))
    if ((starts <= low) & (high <= stops)).all(axis=1).any():
        return [index_range]
    meeting = np.flatnonzero(((starts < high) & (low < stops)).all(axis=1))
    shares = [both for i in meeting if (both := intersect(index_range, distinct[i])) is not None]
    if sum(map(volume, shares)) == volume(index_range) and _first_overlap(shares) is None:
        return sorted(shares)  # nearly always: one shard server has each element
    parts, rest = [], [index_range]
    for share in sorted(shares, key=lambda share: (-volume(share), share)):
        parts += [both for left in rest if (both := intersect(left, share)) is not None]
        rest = [left for before in rest for left in _without(before, share)]
        if not rest:
            return sorted(parts)
    return []


@lru_cache(maxsize=1 << 16)
def _domain(index_range: IndexRange) -> "ts.IndexDomain":
    import tensorstore as ts  # 15 MB, which the driver of a run does without

    return ts.IndexDomain(
        inclusive_min=[start for start, _ in index_range], exclusive_max=[stop for _, stop in index_range]
    )


@lru_cache(maxsize=1 << 10)
def _ends(index_ranges: tuple[IndexRange, ...], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops, int64 [index_ranges, rank], for numpy (WeightsError: other numbers of dimensions)."""
    odd = next((index_range for index_range in index_ranges if len(index_range) != rank), None)
    if odd is not None:
        raise WeightsError(f"index range {describe(odd)} has {len(odd)} dimensions; expected {rank}")
    ends = np.asarray(index_ranges, np.int64).reshape(len(index_ranges), rank, 2)
    return ends[..., 0], ends[..., 1]


def index_range_of(index: tuple[slice, ...], shape: Sequence[int]) -> IndexRange:
    """Convert the slices of a jax index; their ends are None where they are those of the tensor."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _without(index_range: IndexRange, other: IndexRange) -> list[IndexRange]:
    """Return the rest of an index range outside the other: at most two slabs for each dimension."""
    both = intersect(index_range, other)
    if both is None:
        return [index_range]
    slabs = []
    for axis, ((start, stop), (first, last)) in enumerate(zip(index_range, both, strict=True)):
        # Before this axis the slab is as narrow as the intersection, behind it as wide as the index range.
        for slab in ((start, first), (last, stop)):
            if slab[0] < slab[1]:
                slabs.append((*both[:axis], slab, *index_range[axis + 1 :]))
    return slabs


def _first_overlap(index_ranges: Sequence[IndexRange], rows: int = 1024) -> tuple[int, int] | None:
    """Return the positions of the first two overlapping index ranges. In numpy: 1,000 of them are 500,000 pairs."""
    if len(index_ranges) < 2:
        return None
    starts, stops = _ends(tuple(index_ranges), len(index_ranges[0]))
    for top in range(0, len(index_ranges), rows):
        meet = np.ones((len(index_ranges[top : top + rows]), len(index_ranges)), bool)
        for low, high in zip(starts.T, stops.T, strict=True):
            meet &= (low[top : top + rows, None] < high) & (low < high[top : top + rows, None])
        meet = np.triu(meet, top + 1)
        if meet.any():
            first, second = (int(i) for i in np.argwhere(meet)[0])
            return top + first, second
    return None
