"""Reading of index ranges of a version: request in batches, decode, verify, assemble, and place on devices."""

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from axlearn_like.checkpoint.plain.plain_arrays import EntriesStruct, StackEntries
from rl.parameter_server.codecs import DeltaCodec, get_codec
from rl.parameter_server.errors import WeightsError, WrongBase
from rl.parameter_server.fingerprint import as_bytes, digest_of
from rl.parameter_server.index_ranges import IndexRange, covering, describe, shape_of, slices, within
from rl.parameter_server.manifest import Manifest
from rl.parameter_server.store.buffer_pool import BUFFERS
from rl.parameter_server.store.shard_server import ReadOptions, ReadReply, ShardId, ShardReader, view
from rl.parameter_server.transport.shared_memory import SegmentGone, SharedSegment
from rl.protocol.messages import PullStats

_BATCH = 16 << 20  # decoded bytes per request, or one index range if it is larger


@dataclasses.dataclass(frozen=True, slots=True)
class HeldPart:
    """Part of a wanted index range (`outer`) that one server holds."""

    tensor: str
    index_range: IndexRange
    outer: IndexRange  # the wanted one, which holds `index_range`
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the part, decoded."""
        return int(np.prod(shape_of(self.index_range), dtype=np.int64)) * self.dtype.itemsize


def parts_by_server(
    manifest: Manifest, wanted: Sequence[ShardId], dtypes: Mapping[str, np.dtype[Any]]
) -> dict[int, list[HeldPart]]:
    """Cut index ranges where the trainer's shards end, and group them by the shard server that holds them."""
    shards = manifest.shards_by_tensor()
    parts: dict[int, list[HeldPart]] = {}
    plans: dict[tuple[Any, ...], list[tuple[IndexRange, int]]] = {}  # shared by tensors of one shape and sharding
    for tensor, index_range in wanted:
        held = {shard.index_range: shard.server for shard in shards[tensor]}
        name = (index_range, tuple(held.items()))
        if name not in plans:
            plans[name] = [
                (part, next(server for outer, server in held.items() if within(part, outer)))
                for part in covering(index_range, list(held)) or [index_range]
            ]
        for part, server in plans[name]:
            parts.setdefault(server, []).append(HeldPart(tensor, part, index_range, dtypes[tensor]))
    return parts


class Fetch:
    """Index ranges of one version as they arrive, from one or several servers concurrently."""

    def __init__(
        self,
        key: int,
        options: ReadOptions,
        bases: Mapping[ShardId, np.ndarray],
        segments: dict[str, SharedSegment],
        stats: PullStats,
    ):
        """Start a fetch; `bases`: local arrays of the version `options.base`; `segments`: those mapped so far."""
        self._key, self._options, self._bases, self._stats = key, options, bases, stats
        self._segments = segments
        self._lock = threading.Lock()
        self.index_ranges: dict[ShardId, np.ndarray] = {}
        self.mapped: set[str] = set()  # names of segments in use

    def read(self, server: ShardReader, parts: Sequence[HeldPart]) -> None:
        """Read these parts from one server (VersionGone: some are gone; WeightsError: damaged twice, or no server)."""
        for batch in _batches(parts):
            targets = [self._target(part) for part in batch]
            wanted = [(part.tensor, part.index_range) for part in batch]
            answers = server.read(
                self._key, wanted, self._options, [None if t is None else as_bytes(t) for t in targets]
            )
            for part, target, answer in zip(batch, targets, answers, strict=True):
                try:
                    array = self._decode(part, answer)
                except (WrongBase, _Damaged, SegmentGone):
                    again = dataclasses.replace(self._options, codec="raw", base=None, host=None)
                    (answer,) = server.read(self._key, [(part.tensor, part.index_range)], again)
                    array = self._decode(part, answer)
                self._put(part, target, array)

    def _target(self, part: HeldPart) -> np.ndarray | None:
        """Return the contiguous memory for a part within its index range; None if there is none, or it is all of it."""
        if part.index_range == part.outer:
            return None
        place = self._place(part)
        return place if place.flags.c_contiguous else None

    def _place(self, part: HeldPart) -> np.ndarray:
        with self._lock:
            name = (part.tensor, part.outer)
            if name not in self.index_ranges:
                self.index_ranges[name] = BUFFERS.empty(shape_of(part.outer), part.dtype)
            return self.index_ranges[name][(*slices(part.index_range, part.outer), ...)]

    def _put(self, part: HeldPart, target: np.ndarray | None, array: np.ndarray) -> None:
        with self._lock:
            self._stats.read += array.nbytes
            if part.index_range == part.outer:
                self.index_ranges[part.tensor, part.outer] = array
                return
        if target is None or not np.may_share_memory(target, array):
            np.copyto(self._place(part), array)

    def _decode(self, part: HeldPart, answer: ReadReply) -> np.ndarray:
        if answer.location is not None:
            return self._map(part, *answer.location)
        codec, shape = get_codec(answer.codec), shape_of(part.index_range)
        local = isinstance(answer.data, np.ndarray) and answer.data.dtype == part.dtype and answer.data.shape == shape
        if local and answer.codec == "raw":
            return answer.data
        data = answer.data
        with self._lock:
            self._stats.network += len(data)
        if not codec.lossless and digest_of(data) != answer.digest:
            raise self._damaged(part)
        if answer.codec == "raw":
            if len(data) != part.nbytes:
                raise self._damaged(part)
            array = np.frombuffer(data, np.uint8).view(part.dtype).reshape(shape)
        else:
            base = None
            if codec.needs_base:
                held = self._bases[part.tensor, part.outer]
                base = held[(*slices(part.index_range, part.outer), ...)]
            array = codec.decode(memoryview(data), shape=shape, dtype=part.dtype, base=base)
        verified = codec.digest(memoryview(data)) if isinstance(codec, DeltaCodec) else None
        if codec.lossless and (verified or digest_of(array)) != answer.digest:
            raise self._damaged(part)
        return array

    def _map(self, part: HeldPart, name: str, offset: int) -> np.ndarray:
        with self._lock:
            segment = self._segments.get(name)
            if segment is None:
                segment = self._segments[name] = SharedSegment.attach(name)
            self.mapped.add(name)
            self._stats.mapped += part.nbytes
        return view(segment.buffer, offset, part.index_range, part.dtype.name)

    def _damaged(self, part: HeldPart) -> "_Damaged":
        return _Damaged(f"{part.tensor}{describe(part.index_range)}: damaged in transit (digests differ)")


class _Damaged(WeightsError):
    pass


def _batches(parts: Sequence[HeldPart]) -> Iterator[list[HeldPart]]:
    batch: list[HeldPart] = []
    size = 0
    for part in parts:
        if batch and size + part.nbytes > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part.nbytes
    if batch:
        yield batch


type Needed = Mapping[IndexRange, Sequence[Any]]  # devices by index range


def place(arrays: Mapping[IndexRange, np.ndarray], needed: Needed, leaf: Any) -> jax.Array | StackEntries:
    """Return a tensor on the devices of this process; without a copy where these are the CPU of the host.

    Args:
        arrays: its index ranges.
        needed: the devices that need them.
        leaf: shape and sharding. Of an `EntriesStruct` whose first axis is whole come its entries, in arrays of their
            own, so nobody has to cut the stack.
    """
    parts = [(arrays[index_range], device) for index_range, devices in needed.items() for device in devices]
    if not isinstance(leaf, EntriesStruct) or any(part.shape[0] != leaf.shape[0] for part, _ in parts):
        return _assembled(parts, leaf.shape, leaf.sharding)
    of_an_entry = leaf.of_an_entry
    return StackEntries(
        [
            _assembled([(part[index], device) for part, device in parts], leaf.shape[1:], of_an_entry)
            for index in range(leaf.shape[0])
        ]
    )


def _assembled(parts: Sequence[tuple[np.ndarray, Any]], shape: Sequence[int], sharding: Sharding) -> jax.Array:
    placed = [jax.device_put(part, device) for part, device in parts]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, placed)
