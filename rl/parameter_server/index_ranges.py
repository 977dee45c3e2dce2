"""Boxes: the parts of a tensor that a device holds or needs, and which parts of the one make up the other.

A box is one half-open range of indices for each dimension. Boxes are plain tuples, because they are keys, travel as
JSON and are compared by the thousand; what lies in two of them is TensorStore's arithmetic of index domains. Making
such a domain costs more (1.6 us) than the intersection itself (0.4 us), so domains are kept: a model has few
distinct boxes, since tensors of one shape and sharding share theirs.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Sharding

from rl.parameter_server.errors import WeightsError

type Box = tuple[tuple[int, int], ...]  # [start, stop) by dimension; () for a scalar


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, int(size)) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of the array that holds what is in the box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """The number of elements: 1 for a scalar, 0 for an empty range."""
    return _domain(box).size


def describe(box: Box) -> str:
    """The box as one would index with it: "[0:2, 4:8]"."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def intersect(a: Box, b: Box) -> Box | None:
    """What lies in both, None if nothing does. Compare with `is None`: the box of a scalar, (), is false.

    Raises:
        WeightsError: the boxes have different numbers of dimensions.
    """
    if len(a) != len(b):
        raise WeightsError(f"boxes {describe(a)} and {describe(b)} are of tensors with different numbers of dimensions")
    both = _domain(a).intersect(_domain(b))
    return tuple(zip(both.inclusive_min, both.exclusive_max, strict=True)) if both.size else None


def within(box: Box, outer: Box) -> bool:
    """Whether the box lies in `outer`, border to border."""
    return len(box) == len(outer) and all(o[0] <= b[0] and b[1] <= o[1] for b, o in zip(box, outer, strict=True))


def slices(box: Box, inside: Box) -> tuple[slice, ...]:
    """`box` within the array that holds the box `inside`. Index with (*slices, ...): a scalar, too, stays a view.

    Raises:
        WeightsError: the one does not lie in the other.
    """
    if not within(box, inside):
        raise WeightsError(f"box {describe(box)} does not lie in {describe(inside)}")
    return tuple(slice(b[0] - i[0], b[1] - i[0]) for b, i in zip(box, inside, strict=True))


def owned_pieces(array: jax.Array, turn: int = 0) -> list[tuple[Box, jax.Array]]:
    """The pieces that this process has to send: of every distinct box of the array one copy, held by one device.

    Args:
        array: with any sharding; all processes that hold parts of it, taken together, own each element once.
        turn: which of several replicas sends, modulo their number and the same in all processes. With another turn
            for each tensor, processes that hold the same share the work.

    Returns:
        Boxes and the single-device arrays that hold them.
    """
    boxes = [box_of(index, array.shape) for index in array.sharding.devices_indices_map(array.shape).values()]
    sender = turn % (len(boxes) // len(set(boxes)))  # a sharding gives every box to equally many devices
    shards = [shard for shard in array.addressable_shards if shard.replica_id == sender]
    return [(box_of(shard.index, array.shape), shard.data) for shard in shards]


def needed_boxes(sharding: Sharding, shape: Sequence[int]) -> dict[Box, list[Any]]:
    """The distinct boxes of a tensor that this process's devices need, each with the devices that need it."""
    needed: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        needed.setdefault(box_of(index or (), shape), []).append(device)
    return needed


def check_cover(name: str, shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """See that the boxes make up the tensor: every element in exactly one of them.

    Raises:
        WeightsError: naming the tensor, and the first box that does not belong to it, overlap, or hole.
    """
    tensor, kept = whole(shape), []
    for box in boxes:
        if not within(box, tensor) or any(stop < start for start, stop in box):
            raise WeightsError(f"tensor {name}: piece {describe(box)} is not a part of its shape {tuple(shape)}")
        if volume(box):
            kept.append(box)
    overlap = _first_overlap(kept)
    if overlap is not None:
        first, second = (kept[i] for i in overlap)
        raise WeightsError(
            f"tensor {name} of shape {tuple(shape)}: pieces {describe(first)} and {describe(second)} overlap"
        )
    if sum(map(volume, kept)) < volume(tensor):  # without overlaps the elements can simply be counted
        holes = [tensor]
        for box in sorted(kept):
            holes = [rest for hole in holes for rest in _without(hole, box)]
        raise WeightsError(f"tensor {name} of shape {tuple(shape)}: no piece holds {describe(min(holes))}")


def covering(box: Box, held: Sequence[Box]) -> list[Box]:
    """Disjoint parts of `box`, each inside one of the held boxes, that together are the box.

    One part if a single held box has it all; otherwise the held box with the largest share goes first. The held
    boxes may overlap and repeat, as those of several holders do.

    Returns:
        [] if the held boxes lack some of it, and for a box without elements that none of them encloses.
    """
    distinct = tuple(dict.fromkeys(held))
    if box in distinct:
        return [box]
    starts, stops = _ends(distinct, len(box))
    low, high = _ends((box,), len(box))
    if ((starts <= low) & (high <= stops)).all(axis=1).any():
        return [box]
    meeting = np.flatnonzero(((starts < high) & (low < stops)).all(axis=1))
    shares = [both for i in meeting if (both := intersect(box, distinct[i])) is not None]
    if sum(map(volume, shares)) == volume(box) and _first_overlap(shares) is None:
        return sorted(shares)  # as they are for one holder of each element, nearly always
    parts, rest = [], [box]
    for share in sorted(shares, key=lambda share: (-volume(share), share)):
        parts += [both for left in rest if (both := intersect(left, share)) is not None]
        rest = [left for before in rest for left in _without(before, share)]
        if not rest:
            return sorted(parts)
    return []


@lru_cache(maxsize=1 << 16)
def _domain(box: Box) -> ts.IndexDomain:
    return ts.IndexDomain(inclusive_min=[start for start, _ in box], exclusive_max=[stop for _, stop in box])


@lru_cache(maxsize=1 << 10)
def _ends(boxes: tuple[Box, ...], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The starts and the stops of boxes, int64 [boxes, rank]: a test of one box against all costs one of each pair.

    Raises:
        WeightsError: a box has another number of dimensions.
    """
    odd = next((box for box in boxes if len(box) != rank), None)
    if odd is not None:
        raise WeightsError(f"box {describe(odd)} has {len(odd)} dimensions; expected {rank}")
    ends = np.asarray(boxes, np.int64).reshape(len(boxes), rank, 2)
    return ends[..., 0], ends[..., 1]


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """The box that jax names by slices; their ends are None where they are those of the tensor."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _without(box: Box, other: Box) -> list[Box]:
    """What is left of a box outside the other: at most two slabs for each dimension."""
    both = intersect(box, other)
    if both is None:
        return [box]
    slabs = []
    for axis, ((start, stop), (first, last)) in enumerate(zip(box, both, strict=True)):
        # Before this axis the slab is as narrow as the intersection, behind it as wide as the box.
        for slab in ((start, first), (last, stop)):
            if slab[0] < slab[1]:
                slabs.append((*both[:axis], slab, *box[axis + 1 :]))
    return slabs


def _first_overlap(boxes: Sequence[Box], rows: int = 1024) -> tuple[int, int] | None:
    """The first two boxes (by position) with an element in common. By numpy: a thousand boxes are 500,000 pairs."""
    if len(boxes) < 2:
        return None
    starts, stops = _ends(tuple(boxes), len(boxes[0]))
    for top in range(0, len(boxes), rows):
        meet = np.ones((len(boxes[top : top + rows]), len(boxes)), bool)
        for low, high in zip(starts.T, stops.T, strict=True):
            meet &= (low[top : top + rows, None] < high) & (low < high[top : top + rows, None])
        meet = np.triu(meet, top + 1)
        if meet.any():
            first, second = (int(i) for i in np.argwhere(meet)[0])
            return top + first, second
    return None
