"""Store of the shards in one process: a shard server, or a worker that serves its peers.

The store does not know which shards make up a whole tensor; the directory does. Memory is never freed explicitly: reads
return views that keep their memory alive, so a version can be dropped while it is being read.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mesh import UserError, did_you_mean
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import as_bytes, digest_of
from rl.parameter_server.index_ranges import IndexRange, covering, describe, shape_of, slices, volume, within
from rl.parameter_server.transport.shared_memory import Segment

# Between these numpy and XLA agree to the bit, NaN included. To float16 they give NaN different payloads.
_CONVERTIBLE = ("bfloat16", "float32")


class Location(NamedTuple):
    """Location of an index range in shared memory."""

    segment: str
    offset: int


class ShardStore:
    """Store of shards (tensor, index range, array) by version. Thread-safe; no lock is held while bytes are copied.

    Arrays returned by reads are read-only, since most are the memory of the store itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[int, _Version] = {}

    def add(
        self,
        version: int,
        shards: Sequence[tuple[str, IndexRange, np.ndarray]],
        *,
        keep_alive: object = None,
        digests: Sequence[str] = (),
    ) -> None:
        """Add shards: all of them or, if one is refused, none. A version exists from its first shard on.

        Args:
            version: the version's number.
            shards: tensor, index range, and the array of that part. Contiguous arrays are kept without a copy, and the
                caller must not change them any more. A shard that is held already must have the same bytes.
            keep_alive: owner of the arrays' memory, released after the last reader of any of them. If it is a `Segment`
                created by this process, the store takes ownership: it is unlinked when none of its shards is held any
                more (immediately, if all of them were held before).
            digests: of the shards, in order, if the caller has computed them.

        Raises:
            WeightsError: the shape is not that of the index range, the dtype not that of the tensor's other shards, or
                the bytes are not those of the same shard that is held.
        """
        segment = keep_alive if isinstance(keep_alive, Segment) else None
        arriving: dict[tuple[str, IndexRange], _Shard] = {}
        for tensor, index_range, array in shards:
            name = _name(version, tensor, index_range)
            if array.shape != shape_of(index_range):
                raise WeightsError(f"{name}: the array has shape {array.shape}")
            tied = _tied(array, keep_alive)
            shard = _Shard(tied, segment if segment is not None and _lies_in(tied, segment) else None)
            _require_same(name, arriving.setdefault((tensor, index_range), shard).array, shard.array)
        compared: dict[tuple[str, IndexRange], _Shard] = {}
        while True:
            with self._lock:
                entry = self._versions.get(version) or _Version(version)
                held = {key: shard for key in arriving if (shard := entry.get(*key)) is not None}
                if all(compared.get(key) is shard for key, shard in held.items()):
                    entry.insert({key: shard for key, shard in arriving.items() if key not in held})
                    if entry.tensors:
                        self._versions[version] = entry
                    kept = self._segments()
                    break
            for key, shard in held.items():
                _require_same(_name(version, *key), shard.array, arriving[key].array)
            compared = held
        for (tensor, index_range, _), digest in zip(shards, digests, strict=bool(digests)):
            if (tensor, index_range) not in held:
                entry.digests.get((tensor, index_range, None), lambda known=digest: known)
        if segment is not None and segment.name not in kept:
            segment.unlink()

    def read(self, version: int, tensor: str, index_range: IndexRange, dtype: str | None = None) -> np.ndarray:
        """Return the array of an index range, C-contiguous: a view if one shard holds it contiguously, else assembled.

        Args:
            version: the version.
            tensor: path of the tensor.
            index_range: the part to read.
            dtype: name of the dtype to convert to, if not that of the shards. Rounds to nearest even, as `jnp.astype`.
                Shards are converted whole, once, and the conversions kept as long as the version.

        Raises:
            VersionGone: no shard of the version is held.
            WeightsError: the index range is not held completely, or there is no conversion to the dtype.
        """
        return self._entry(version).read(tensor, index_range, dtype)

    def where(self, version: int, tensor: str, index_range: IndexRange, dtype: str | None = None) -> Location | None:
        """Return the location of the bytes of `read` in shared memory; None if not contiguous. Raises as `read`."""
        shard = self._entry(version).view(tensor, index_range, dtype)
        if shard is None or shard.segment is None or not shard.array.size:
            return None
        return Location(shard.segment.name, _address(shard.array) - _address(shard.segment.buffer))

    def digest(self, version: int, tensor: str, index_range: IndexRange, dtype: str | None = None) -> str:
        """Return the XXH3-128 of the bytes of `read`, in hexadecimal; computed once. Raises as `read`."""
        entry = self._entry(version)

        def compute() -> str:
            return digest_of(entry.read(tensor, index_range, dtype))

        return entry.digests.get((tensor, index_range, dtype), compute)

    def versions(self) -> list[int]:
        """Return the versions with shards here, ascending."""
        with self._lock:
            return sorted(self._versions)

    def shards(self, version: int) -> list[tuple[str, IndexRange, np.ndarray]]:
        """Return all shards of the version, without conversions. Raises VersionGone."""
        tensors = self._entry(version).tensors
        return [
            (tensor, index_range, shard.array)
            for tensor, held in list(tensors.items())
            for index_range, shard in held.items()
        ]

    def drop(self, version: int) -> None:
        """Drop the version, if it is held. Arrays that were read stay valid."""
        self._keep(lambda number: number != version)

    def drop_all_but(self, versions: Collection[int]) -> None:
        """Drop all other versions."""
        self._keep(lambda number: number in versions)

    def nbytes(self, version: int | None = None) -> int:
        """Return the bytes of the shards held and of their conversions, of one version or of all."""
        with self._lock:
            entries = [entry for number, entry in self._versions.items() if version in (None, number)]
        return sum(shard.array.nbytes for entry in entries for shard in entry.everything())

    def _entry(self, version: int) -> "_Version":
        with self._lock:
            entry = self._versions.get(version)
            if entry is None:
                held = ", ".join(map(str, sorted(self._versions))) or "none"
                raise VersionGone(f"version {version} of the weights is not held here; versions held: {held}")
            return entry

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        with self._lock:
            before, entries = self._segments(), self._versions
            self._versions = {number: entry for number, entry in entries.items() if wanted(number)}
            after = self._segments()
        for number, entry in entries.items():
            if not wanted(number):
                entry.withdraw()
        for name, segment in before.items():
            if name not in after:
                segment.unlink()

    def _segments(self) -> dict[str, Segment]:
        return {name: segment for entry in self._versions.values() for name, segment in entry.segments.items()}


class _Shard(NamedTuple):
    array: np.ndarray  # read-only, C-contiguous
    segment: Segment | None  # the shared memory that holds it


class _Version:
    """Contents of one version. The dict of a tensor is replaced, never mutated, so that readers need no lock."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensors: dict[str, dict[IndexRange, _Shard]] = {}
        self.segments: dict[str, Segment] = {}
        self.conversions: _Once[_Shard] = _Once()
        self._slots: dict[
            tuple[str, IndexRange, str], _Shard | None
        ] = {}  # buffer slots for conversions in shared memory
        self._slot_segments: list[Segment] = []
        self._withdrawn = False
        self._slots_lock = threading.Lock()
        self.digests: _Once[str] = _Once()

    def get(self, tensor: str, index_range: IndexRange) -> _Shard | None:
        return self.tensors.get(tensor, {}).get(index_range)

    def insert(self, shards: dict[tuple[str, IndexRange], _Shard]) -> None:
        new: dict[str, dict[IndexRange, _Shard]] = {}
        for (tensor, index_range), shard in shards.items():
            held = new.setdefault(tensor, dict(self.tensors.get(tensor, {})))
            held[index_range] = shard
            other_index_range, other = next(iter(held.items()))
            if (shard.array.dtype, shard.array.ndim) != (other.array.dtype, other.array.ndim):
                raise WeightsError(
                    f"{_name(self.number, tensor, index_range)}: got {shard.array.ndim}-d {shard.array.dtype}, but the "
                    f"shard {describe(other_index_range)} is {other.array.ndim}-d {other.array.dtype}"
                )
        self.tensors |= new
        self.segments |= {shard.segment.name: shard.segment for shard in shards.values() if shard.segment is not None}

    def view(self, tensor: str, index_range: IndexRange, dtype: str | None) -> _Shard | None:
        """Return the index range as a contiguous part of one shard, or None."""
        outer = _around(index_range, self._of(tensor, index_range))
        if outer is None:
            return None
        shard = self._converted(tensor, outer, dtype)
        part = shard.array[(*slices(index_range, outer), ...)]
        return _Shard(part, shard.segment) if part.flags.c_contiguous else None

    def read(self, tensor: str, index_range: IndexRange, dtype: str | None) -> np.ndarray:
        shard = self.view(tensor, index_range, dtype)
        if shard is not None:
            return shard.array
        held = self._of(tensor, index_range)
        parts = _parts(index_range, tuple(sorted(held)))
        if not parts and volume(index_range):
            more = f", ... ({len(held)} in all)" if len(held) > 8 else ""
            listed = ", ".join(map(describe, sorted(held)[:8])) + more
            raise WeightsError(
                f"{_name(self.number, tensor, index_range)} is not held whole; index ranges held: {listed}"
            )
        array = np.empty(shape_of(index_range), dtype or next(iter(held.values())).array.dtype)
        for part, outer in parts:
            source = self._converted(tensor, outer, dtype).array[(*slices(part, outer), ...)]
            np.copyto(_bits(array)[(*slices(part, index_range), ...)], _bits(source))
        array.flags.writeable = False
        return array

    def withdraw(self) -> None:
        """Unlink the conversions in shared memory; processes that have mapped them keep them."""
        with self._slots_lock:
            self._withdrawn = True
            for segment in self._slot_segments:
                segment.unlink()

    def everything(self) -> list[_Shard]:
        """Return shards and conversions."""
        return [shard for held in list(self.tensors.values()) for shard in held.values()] + self.conversions.done()

    def _of(self, tensor: str, index_range: IndexRange) -> dict[IndexRange, _Shard]:
        held = self.tensors.get(tensor)
        if held is None:
            raise WeightsError(
                f"version {self.number} of the weights: no shard of tensor {tensor!r} is held here"
                + did_you_mean(tensor, list(self.tensors))
            )
        if len(index_range) != len(other := next(iter(held))):
            raise WeightsError(
                f"{_name(self.number, tensor, index_range)}: {len(index_range)} dimensions requested of a tensor with "
                f"{len(other)}"
            )
        return held

    def _converted(self, tensor: str, index_range: IndexRange, dtype: str | None) -> _Shard:
        shard = self.tensors[tensor][index_range]
        if dtype in (None, shard.array.dtype.name):
            return shard
        for name in (shard.array.dtype.name, dtype):
            if name not in _CONVERTIBLE:
                raise WeightsError(
                    f"{_name(self.number, tensor, index_range)} is {shard.array.dtype} and cannot be had as {dtype}: "
                    f"the conversions are between {' and '.join(_CONVERTIBLE)}"
                )

        def convert() -> _Shard:
            slot = self._slot(tensor, index_range, dtype) if shard.segment else None
            slot = slot or _Shard(np.empty(shape_of(index_range), dtype), None)
            with np.errstate(over="ignore", invalid="ignore"):  # overflow to inf and NaN to NaN silently, as in jax
                np.copyto(slot.array, shard.array, casting="unsafe")
            return _Shard(_tied(slot.array, slot.segment), slot.segment)

        return self.conversions.get((tensor, index_range, dtype), convert)

    def _slot(self, tensor: str, index_range: IndexRange, dtype: str) -> _Shard | None:
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
                    segment = Segment.create(end)
                    self._slot_segments.append(segment)
                    if self._withdrawn:
                        segment.unlink()
                for (name, index_range), start, size in zip(index_ranges, starts, sizes, strict=True):
                    self._slots[name, index_range, dtype] = segment and _Shard(
                        segment.buffer[start : start + size].view(dtype).reshape(shape_of(index_range)), segment
                    )
            return self._slots[wanted]


class _Once[T]:
    """Results that several threads request and one computes, while the others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
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

    def done(self) -> list[T]:
        with self._lock:
            futures = list(self._futures.values())
        return [future.result() for future in futures if future.done() and future.exception() is None]


class _Tied:
    """Buffer for `np.asarray`: arrays over it keep the owner alive and are read-only."""

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self.owner = (array, owner)
        self.__array_interface__ = {**as_bytes(array).__array_interface__, "data": (_address(array), True)}


def _tied(array: np.ndarray, owner: object) -> np.ndarray:
    """Return the array C-contiguous and read-only; without a copy, keeping the owner alive, if it was contiguous."""
    if not array.flags.c_contiguous or owner is None or not array.size:
        tied = np.asarray(array, order="C").view()
        tied.flags.writeable = False
        return tied
    return np.asarray(_Tied(array, owner)).view(array.dtype).reshape(array.shape)


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the same memory as unsigned integers, which numpy copies faster than custom dtypes."""
    return array.view(f"u{array.itemsize}") if array.itemsize in (1, 2, 4, 8) else array


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _lies_in(array: np.ndarray, segment: Segment) -> bool:
    start = _address(array) - _address(segment.buffer)
    return array.size > 0 and 0 <= start <= segment.nbytes - array.nbytes


@lru_cache(maxsize=1024)
def _parts(index_range: IndexRange, held: tuple[IndexRange, ...]) -> list[tuple[IndexRange, IndexRange]]:
    """Return the parts that make up the index range, each with a held index range that contains it.

    For a thousand shards this takes longer than copying them, but it is the same for every version.
    """
    return [(part, outer) for part in covering(index_range, held) if (outer := _around(part, held)) is not None]


def _around(index_range: IndexRange, held: Collection[IndexRange]) -> IndexRange | None:
    """Return a held index range that contains this one."""
    return index_range if index_range in held else next((outer for outer in held if within(index_range, outer)), None)


def _require_same(name: str, held: np.ndarray, arrived: np.ndarray) -> None:
    if held.dtype != arrived.dtype:
        raise WeightsError(f"{name} is held as {held.dtype}, and was sent again as {arrived.dtype}")
    if held is not arrived and not np.array_equal(as_bytes(held), as_bytes(arrived)):
        raise WeightsError(f"{name} is held, and was sent again with other bytes")


def _name(version: int, tensor: str, index_range: IndexRange) -> str:
    return f"version {version} of the weights, tensor {tensor!r}, index range {describe(index_range)}"
