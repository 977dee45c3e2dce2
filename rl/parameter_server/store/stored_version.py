"""The shards of one version in a store, read as any index range."""

import threading
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mesh import did_you_mean
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.index_ranges import IndexRange, covering, describe, shape_of, slices, volume, within
from rl.parameter_server.store.arrays import as_unsigned
from rl.parameter_server.transport.shared_memory import SharedSegment


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

    def view(self, tensor: str, index_range: IndexRange) -> StoredShard | None:
        """Return the index range as a contiguous part of one shard, or None."""
        outer = _around(index_range, self._of(tensor, index_range))
        if outer is None:
            return None
        shard = self.tensors[tensor][outer]
        part = shard.array[(*slices(index_range, outer), ...)]
        return StoredShard(part, shard.segment) if part.flags.c_contiguous else None

    def read(self, tensor: str, index_range: IndexRange) -> np.ndarray:
        """Return the array of an index range, C-contiguous and read-only (see `ShardStore.read`)."""
        shard = self.view(tensor, index_range)
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
        array = np.empty(shape_of(index_range), next(iter(held.values())).array.dtype)
        for part, outer in parts:
            source = held[outer].array[(*slices(part, outer), ...)]
            np.copyto(as_unsigned(array)[(*slices(part, index_range), ...)], as_unsigned(source))
        array.flags.writeable = False
        return array

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
                    self._futures.pop(key, None)
                future.set_exception(error)
        return future.result()

    def known(self, key: Hashable) -> T | None:
        """Return the result for the key, or None if nobody has computed it."""
        with self._lock:
            future = self._futures.get(key)
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def names(self) -> list[Any]:
        """Return the keys of all results, computed or not."""
        with self._lock:
            return list(self._futures)

    def forget(self, of: Callable[[Any], bool]) -> None:
        """Drop the results whose keys fulfil this."""
        with self._lock:
            self._futures = {key: future for key, future in self._futures.items() if not of(key)}


@lru_cache(maxsize=1024)
def _parts(index_range: IndexRange, held: tuple[IndexRange, ...]) -> list[tuple[IndexRange, IndexRange]]:
    """Return the parts of an index range, each with a held one around it: slow for many shards, once a version."""
    return [(part, outer) for part in covering(index_range, held) if (outer := _around(part, held)) is not None]


def _around(index_range: IndexRange, held: Collection[IndexRange]) -> IndexRange | None:
    """Return a held index range that contains this one."""
    return index_range if index_range in held else next((outer for outer in held if within(index_range, outer)), None)


def shard_name(version: int, tensor: str, index_range: IndexRange) -> str:
    """Return the name of a shard, for messages."""
    return f"version {version} of the weights, tensor {tensor!r}, index range {describe(index_range)}"
