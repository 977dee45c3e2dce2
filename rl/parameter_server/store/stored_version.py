"""The shards of one version in a store, read as any index range and in another dtype."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mesh import UserError, did_you_mean
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.index_ranges import IndexRange, covering, describe, shape_of, slices, volume, within
from rl.parameter_server.store.arrays import as_unsigned, read_only
from rl.parameter_server.store.buffer_pool import BUFFERS
from rl.parameter_server.store.rounding import convert
from rl.parameter_server.transport.shared_memory import SharedSegment

# Between these numpy and XLA agree to the bit, NaN included. To float16 they give NaN different payloads.
_CONVERTIBLE = ("bfloat16", "float32")


class StoredShard(NamedTuple):
    """Shard in memory."""

    array: np.ndarray  # read-only, C-contiguous
    segment: SharedSegment | None  # the shared memory that holds it


class StoredVersion:
    """Contents of one version. The dict of a tensor is replaced, never mutated, so that readers need no lock."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensors: dict[str, dict[IndexRange, StoredShard]] = {}
        self.segments: dict[str, SharedSegment] = {}
        self.conversions: ComputeOnce[StoredShard] = ComputeOnce()
        # Buffer slots for conversions in shared memory.
        self._slots: dict[tuple[str, IndexRange, str], StoredShard | None] = {}
        self._slot_segments: list[SharedSegment] = []
        self._withdrawn = False
        self._slots_lock = threading.Lock()
        self.digests: ComputeOnce[str] = ComputeOnce()

    def get(self, tensor: str, index_range: IndexRange) -> StoredShard | None:
        """Return a shard, or None."""
        return self.tensors.get(tensor, {}).get(index_range)

    def insert(self, shards: dict[tuple[str, IndexRange], StoredShard]) -> None:
        """Add shards, all of them or none. Raises WeightsError if those of a tensor differ in dtype or rank."""
        new: dict[str, dict[IndexRange, StoredShard]] = {}
        for (tensor, index_range), shard in shards.items():
            held = new.setdefault(tensor, dict(self.tensors.get(tensor, {})))
            held[index_range] = shard
            other_index_range, other = next(iter(held.items()))
            if (shard.array.dtype, shard.array.ndim) != (other.array.dtype, other.array.ndim):
                raise WeightsError(
                    f"{shard_name(self.number, tensor, index_range)}: got {shard.array.ndim}-d {shard.array.dtype}, "
                    f"but the shard {describe(other_index_range)} is {other.array.ndim}-d {other.array.dtype}"
                )
        self.tensors |= new
        self.segments |= {shard.segment.name: shard.segment for shard in shards.values() if shard.segment is not None}

    def view(self, tensor: str, index_range: IndexRange, dtype: str | None) -> StoredShard | None:
        """Return the index range as a contiguous part of one shard, or None."""
        outer = _around(index_range, self._of(tensor, index_range))
        if outer is None:
            return None
        shard = self._converted(tensor, outer, dtype)
        part = shard.array[(*slices(index_range, outer), ...)]
        return StoredShard(part, shard.segment) if part.flags.c_contiguous else None

    def read(self, tensor: str, index_range: IndexRange, dtype: str | None) -> np.ndarray:
        """Return the array of an index range, C-contiguous and read-only (see `ShardStore.read`)."""
        shard = self.view(tensor, index_range, dtype)
        if shard is not None:
            return shard.array
        held = self._of(tensor, index_range)
        parts = _parts(index_range, tuple(sorted(held)))
        if not parts and volume(index_range):
            more = f", ... ({len(held)} in all)" if len(held) > 8 else ""
            listed = ", ".join(map(describe, sorted(held)[:8])) + more
            raise WeightsError(
                f"{shard_name(self.number, tensor, index_range)} is not held whole; index ranges held: {listed}"
            )
        array = np.empty(shape_of(index_range), dtype or next(iter(held.values())).array.dtype)
        for part, outer in parts:
            source = self._converted(tensor, outer, dtype).array[(*slices(part, outer), ...)]
            np.copyto(as_unsigned(array)[(*slices(part, index_range), ...)], as_unsigned(source))
        array.flags.writeable = False
        return array

    def withdraw(self) -> None:
        """Unlink the conversions in shared memory; processes that have mapped them keep them."""
        with self._slots_lock:
            self._withdrawn = True
            for segment in self._slot_segments:
                segment.unlink()

    def everything(self) -> list[StoredShard]:
        """Return shards and conversions."""
        return [shard for held in list(self.tensors.values()) for shard in held.values()] + self.conversions.done()

    def _of(self, tensor: str, index_range: IndexRange) -> dict[IndexRange, StoredShard]:
        held = self.tensors.get(tensor)
        if held is None:
            raise WeightsError(
                f"version {self.number} of the weights: no shard of tensor {tensor!r} is held here"
                + did_you_mean(tensor, list(self.tensors))
            )
        if len(index_range) != len(other := next(iter(held))):
            raise WeightsError(
                f"{shard_name(self.number, tensor, index_range)}: {len(index_range)} dimensions requested of a tensor "
                f"with {len(other)}"
            )
        return held

    def _converted(self, tensor: str, index_range: IndexRange, dtype: str | None) -> StoredShard:
        shard = self.tensors[tensor][index_range]
        if dtype in (None, shard.array.dtype.name):
            return shard
        for name in (shard.array.dtype.name, dtype):
            if name not in _CONVERTIBLE:
                raise WeightsError(
                    f"{shard_name(self.number, tensor, index_range)} is {shard.array.dtype} and cannot be had "
                    f"as {dtype}: the conversions are between {' and '.join(_CONVERTIBLE)}"
                )

        def converted() -> StoredShard:
            slot = self._slot(tensor, index_range, dtype) if shard.segment else None
            slot = slot or StoredShard(BUFFERS.empty(shape_of(index_range), dtype), None)
            convert(shard.array, slot.array)
            return StoredShard(read_only(slot.array, slot.segment), slot.segment)

        return self.conversions.get((tensor, index_range, dtype), converted)

    def _slot(self, tensor: str, index_range: IndexRange, dtype: str) -> StoredShard | None:
        """Return shared memory for the conversion of a shard that lies there itself; None if there is too little.

        One segment for the conversions of all such shards: a reader that needs one of them usually needs most.
        """
        wanted = (tensor, index_range, dtype)
        with self._slots_lock:
            if wanted not in self._slots:
                (other,) = set(_CONVERTIBLE) - {dtype}
                index_ranges = [
                    (name, index_range)
                    for name, held in list(self.tensors.items())
                    for index_range, shard in held.items()
                    if shard.segment
                    and shard.array.dtype.name == other
                    and (name, index_range, dtype) not in self._slots
                ]
                sizes = [volume(index_range) * np.dtype(dtype).itemsize for _, index_range in index_ranges]
                *starts, end = itertools.accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
                segment = None
                with contextlib.suppress(UserError):
                    segment = SharedSegment.create(end)
                    self._slot_segments.append(segment)
                    if self._withdrawn:
                        segment.unlink()
                for (name, index_range), start, size in zip(index_ranges, starts, sizes, strict=True):
                    self._slots[name, index_range, dtype] = segment and StoredShard(
                        segment.buffer[start : start + size].view(dtype).reshape(shape_of(index_range)), segment
                    )
            return self._slots[wanted]


class ComputeOnce[T]:
    """Results that several threads request and one computes, while the others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result for the key; if there is none, `compute` it. An error is raised in all that wait."""
        with self._lock:
            future = self._futures.get(key)
            first = future is None
            if future is None:
                future = self._futures[key] = Future()
        if first:
            try:
                future.set_result(compute())
            except BaseException as error:
                with self._lock:
                    del self._futures[key]
                future.set_exception(error)
        return future.result()

    def known(self, key: Hashable) -> T | None:
        """Return the result for the key, or None if nobody has computed it."""
        with self._lock:
            future = self._futures.get(key)
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def done(self) -> list[T]:
        """Return the results so far."""
        with self._lock:
            futures = list(self._futures.values())
        return [future.result() for future in futures if future.done() and future.exception() is None]


@lru_cache(maxsize=1024)
def _parts(index_range: IndexRange, held: tuple[IndexRange, ...]) -> list[tuple[IndexRange, IndexRange]]:
    """Return the parts that make up the index range, each with a held index range that contains it.

    For a thousand shards this takes longer than copying them, but it is the same for every version.
    """
    return [(part, outer) for part in covering(index_range, held) if (outer := _around(part, held)) is not None]


def _around(index_range: IndexRange, held: Collection[IndexRange]) -> IndexRange | None:
    """Return a held index range that contains this one."""
    return index_range if index_range in held else next((outer for outer in held if within(index_range, outer)), None)


def shard_name(version: int, tensor: str, index_range: IndexRange) -> str:
    """Return the name of a shard, for messages."""
    return f"version {version} of the weights, tensor {tensor!r}, index range {describe(index_range)}"
