"""Store of the shards in one process: a shard server, or a worker that serves its peers.

The store does not know which shards make up a whole tensor; the directory does. Memory is never freed explicitly: reads
return views that keep their memory alive, so a version can be dropped while it is being read.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import as_bytes, digest_of
from rl.parameter_server.index_ranges import IndexRange, shape_of
from rl.parameter_server.store.arrays import address_of, lies_in, read_only
from rl.parameter_server.store.stored_version import StoredShard, StoredVersion, shard_name
from rl.parameter_server.transport.shared_memory import SharedSegment


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
        self._versions: dict[int, StoredVersion] = {}

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
            shards: tensor, index range, and the array of that part. Contiguous arrays are kept without a copy, and the
                caller must not change them any more. A shard that is held already must have the same bytes.
            keep_alive: owner of the arrays' memory, released after the last reader of any of them. A `SharedSegment`
                created by this process passes to the store: it is unlinked when none of its shards is held any
                more (immediately, if all of them were held before).
            digests: digests of the shards, in order, if the caller has computed them.

        Raises:
            WeightsError: the shape is not that of the index range, the dtype not that of the tensor's other shards, or
                the bytes are not those of the same shard that is held.
        """
        segment = keep_alive if isinstance(keep_alive, SharedSegment) else None
        arriving: dict[tuple[str, IndexRange], StoredShard] = {}
        for tensor, index_range, array in shards:
            name = shard_name(version, tensor, index_range)
            if array.shape != shape_of(index_range):
                raise WeightsError(f"{name}: the array has shape {array.shape}")
            kept = read_only(array, keep_alive)
            shard = StoredShard(kept, segment if segment is not None and lies_in(kept, segment) else None)
            _require_same(name, arriving.setdefault((tensor, index_range), shard).array, shard.array)
        compared: dict[tuple[str, IndexRange], StoredShard] = {}
        while True:
            with self._lock:
                entry = self._versions.get(version) or StoredVersion(version)
                held = {key: shard for key in arriving if (shard := entry.get(*key)) is not None}
                if all(compared.get(key) is shard for key, shard in held.items()):
                    entry.insert({key: shard for key, shard in arriving.items() if key not in held})
                    if entry.tensors:
                        self._versions[version] = entry
                    segments = self._segments()
                    break
            for key, shard in held.items():
                _require_same(shard_name(version, *key), shard.array, arriving[key].array)
            compared = held
        for (tensor, index_range, _), digest in zip(shards, digests, strict=bool(digests)):
            if (tensor, index_range) not in held:
                entry.digests.get((tensor, index_range), lambda known=digest: known)
        if segment is not None and segment.name not in segments:
            segment.unlink()

    def link(self, version: int, source: int, shards: Sequence[tuple[str, IndexRange]]) -> None:
        """Add shards of another version with the same contents, without a copy (VersionGone: one is not held)."""
        with self._lock:
            other = self._versions.get(source)
            found = {} if other is None else {name: shard for name in shards if (shard := other.get(*name)) is not None}
            if other is None or len(found) < len(shards):
                raise VersionGone(f"version {source} of the weights is not held here with these shards")
            entry = self._versions.get(version) or StoredVersion(version)
            entry.insert(found)
            self._versions[version] = entry
        for name in found:
            digest = other.digests.known(name)
            if digest is not None:
                entry.digests.get(name, lambda known=digest: known)

    def read(self, version: int, tensor: str, index_range: IndexRange) -> np.ndarray:
        """Return an index range's array, a view if it can be (VersionGone: no shards; WeightsError: not whole)."""
        return self._entry(version).read(tensor, index_range)

    def where(self, version: int, tensor: str, index_range: IndexRange) -> Location | None:
        """Return the location of the bytes of `read` in shared memory; None if not contiguous. Raises as `read`."""
        shard = self._entry(version).view(tensor, index_range)
        if shard is None or shard.segment is None or not shard.array.size:
            return None
        return Location(shard.segment.name, address_of(shard.array) - address_of(shard.segment.buffer))

    def digest(self, version: int, tensor: str, index_range: IndexRange) -> str:
        """Return the XXH3-128 of the bytes of `read`, in hexadecimal; computed once. Raises as `read`."""
        entry = self._entry(version)
        return entry.digests.get((tensor, index_range), lambda: digest_of(entry.read(tensor, index_range)))

    def versions(self) -> list[int]:
        """Return the versions with shards here, ascending."""
        with self._lock:
            return sorted(self._versions)

    def shards(self, version: int) -> list[tuple[str, IndexRange, np.ndarray]]:
        """Return all shards of the version. Raises VersionGone."""
        tensors = self._entry(version).tensors
        return [
            (tensor, index_range, shard.array)
            for tensor, held in list(tensors.items())
            for index_range, shard in held.items()
        ]

    def drop(self, *versions: int) -> None:
        """Drop the versions, as far as they are held. Arrays that were read stay valid."""
        with self._lock:
            before = self._segments()
            self._versions = {number: entry for number, entry in self._versions.items() if number not in versions}
            after = self._segments()
        for name, segment in before.items():
            if name not in after:
                segment.unlink()

    def nbytes(self, version: int | None = None) -> int:
        """Return the bytes of the shards held, of one version or of all."""
        with self._lock:
            entries = [entry for number, entry in self._versions.items() if version in (None, number)]
        return sum(shard.array.nbytes for entry in entries for of in entry.tensors.values() for shard in of.values())

    def _entry(self, version: int) -> StoredVersion:
        with self._lock:
            entry = self._versions.get(version)
            if entry is None:
                held = ", ".join(map(str, sorted(self._versions))) or "none"
                raise VersionGone(f"version {version} of the weights is not held here; versions held: {held}")
            return entry

    def _segments(self) -> dict[str, SharedSegment]:
        return {name: segment for entry in self._versions.values() for name, segment in entry.segments.items()}


def _require_same(name: str, held: np.ndarray, arrived: np.ndarray) -> None:
    if held.dtype != arrived.dtype:
        raise WeightsError(f"{name} is held as {held.dtype}, and was sent again as {arrived.dtype}")
    if held is not arrived and not np.array_equal(as_bytes(held), as_bytes(arrived)):
        raise WeightsError(f"{name} is held, and was sent again with other bytes")
