"""Serving of shards: by the shard servers of the parameter server, and by workers to their peers.

Stores know versions by *keys*: each attempt to publish a version has its own, so shards that a dead trainer has pushed
are never mixed with those of the next attempt (see directory.py).
"""

import dataclasses
import secrets
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from rl.parameter_server.codecs import get_codec
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import digest_of
from rl.parameter_server.index_ranges import IndexRange
from rl.parameter_server.store.offload import OffloadStore
from rl.parameter_server.store.pending_deltas import DeltaShard, PendingDeltas
from rl.parameter_server.store.shard_store import ShardStore
from rl.parameter_server.store.stored_version import ComputeOnce
from rl.parameter_server.transport.shared_memory import SharedSegment, host_identity

type ShardId = tuple[str, IndexRange]  # tensor, index range
type ShardData = tuple[str, IndexRange, np.ndarray, str]  # tensor, index range, array, digest
type SharedShard = tuple[str, IndexRange, str, int]  # tensor, index range, dtype, offset in the segment


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read."""

    codec: str = "raw"  # text for `rl.parameter_server.codecs.get_codec`
    # Key of the version that the reader holds, for delta codecs. A server without it sends raw shards.
    base: int | None = None
    unrounded: tuple[str, ...] = ()  # tensors that come raw instead of by an approximate codec
    host: str | None = None  # the reader's `host_identity`, if it can map shared memory


@dataclasses.dataclass(frozen=True, slots=True)
class ReadReply:
    """Data of one index range."""

    codec: str  # encoding; "raw" where the requested codec was not possible
    # XXH3-128 of the decoded bytes if the codec is lossless, of the encoded ones if not; empty for what has not moved,
    # at `location`
    digest: str
    data: Any  # the bytes; an array where nothing had to be encoded. Empty if they are at `location`.
    location: tuple[str, int] | None = None  # name of a shared memory segment and offset in it


class ShardReader(Protocol):
    """Read access to a shard server, local or remote."""

    def read(
        self, key: int, wanted: Sequence[ShardId], options: ReadOptions, targets: Sequence[np.ndarray | None] = ()
    ) -> list[ReadReply]:
        """Read index ranges; remote raw bytes go into `targets` (uint8, of the decoded size) where given."""
        ...


class ShardServer(ShardReader, Protocol):
    """Shard server, local or remote."""

    def incarnation(self) -> str: ...
    def host(self) -> str: ...
    def write(self, key: int, shards: Sequence[ShardData]) -> None: ...
    def write_deltas(self, key: int, base: int, shards: Sequence[DeltaShard]) -> None: ...
    def adopt(self, key: int, segment: str, shards: Sequence[SharedShard]) -> None: ...
    def link(self, key: int, source: int, shards: Sequence[ShardId]) -> None: ...
    def keys(self) -> list[int]: ...
    def drop(self, keys: Collection[int]) -> None: ...
    def offload(self, key: int, version: int, manifest: str) -> None: ...
    def restore(self, version: int, key: int) -> str | None: ...
    def drop_offloaded(self, after: int) -> None: ...


def live_servers(servers: Sequence[ShardServer]) -> dict[int, str]:
    """Return the incarnations of the shard servers that answer, by their numbers."""
    alive = {}
    for number, server in enumerate(servers):
        try:
            alive[number] = server.incarnation()
        except WeightsError:
            continue
    return alive


class LocalShardServer:
    """Server of the shards in a store; each encoding is computed once for all readers."""

    def __init__(self, store: ShardStore, offload: OffloadStore | None = None):
        """Serve `store`; versions evicted from memory go to `offload`."""
        self.store, self._offload, self._deltas = store, offload, PendingDeltas(store)
        self._incarnation = secrets.token_hex(8)
        self._encoded: ComputeOnce[bytes] = ComputeOnce()  # names: key, tensor, index range, codec, base

    def incarnation(self) -> str:
        """Return a random name that differs after every restart."""
        return self._incarnation

    def host(self) -> str:
        """Return the `host_identity` of its process."""
        return host_identity()

    def write(self, key: int, shards: Sequence[ShardData]) -> None:
        """Store shards, without a copy (WeightsError: a digest does not match; then none is stored)."""
        for tensor, index_range, array, digest in shards:
            if (found := digest_of(array)) != digest:
                raise WeightsError(f"{tensor} {index_range}: damaged in transit: digest {found}, expected {digest}")
        arrays, digests = [shard[:3] for shard in shards], [digest for *_, digest in shards]
        self.store.add(key, arrays, digests=digests)

    def write_deltas(self, key: int, base: int, shards: Sequence[DeltaShard]) -> None:
        """Hold shards as deltas to those of another key, to pass them on (VersionGone; WeightsError: damaged)."""
        self._deltas.add(key, base, shards)
        for shard in shards:
            name = (key, shard.tensor, shard.index_range, "delta", base)
            self._encoded.get(name, lambda blob=shard.blob: blob)

    def adopt(self, key: int, segment: str, shards: Sequence[SharedShard]) -> None:
        """Store shards in shared memory without a copy; digests are computed for readers that cannot map it."""
        memory = SharedSegment.attach(segment)
        arrays = [
            (tensor, index_range, view(memory.buffer, offset, index_range, dtype))
            for tensor, index_range, dtype, offset in shards
        ]
        self.store.add(key, arrays, keep_alive=memory)

    def link(self, key: int, source: int, shards: Sequence[ShardId]) -> None:
        """Hold shards of another key under this one too (VersionGone: they are not held)."""
        for tensor in {tensor for tensor, _ in shards}:
            self._deltas.complete(source, tensor)
        self.store.link(key, source, shards)

    def keep(self, keys: Collection[int]) -> None:
        """Drop all versions but these."""
        self.drop(set(self.keys()).difference(keys))

    def keys(self) -> list[int]:
        """Return the keys of which anything is held."""
        encoded = (name[0] for name in self._encoded.names())
        return sorted({*self.store.versions(), *self._deltas.keys(), *encoded})

    def drop(self, keys: Collection[int]) -> None:
        """Drop these versions; deltas to one of them are decoded first, which may take seconds."""
        self._deltas.drop(keys)
        for key in keys:
            self.store.drop(key)
        self._encoded.forget(lambda name: name[0] in keys)

    def offload(self, key: int, version: int, manifest: str) -> None:
        """Write the shards of a key to the disk or bucket, if there is one."""
        if self._offload is not None and version not in self._offload.versions():
            self._deltas.complete(key)
            self._offload.save(version, manifest, self.store.shards(key))
            self._offload.retire()

    def restore(self, version: int, key: int) -> str | None:
        """Load an offloaded version under a new key; return its manifest as it was given, or None if there is none."""
        if self._offload is None or version not in self._offload.versions():
            return None
        manifest, shards = self._offload.load(version)
        self.store.add(key, list(shards))
        return manifest

    def drop_offloaded(self, after: int) -> None:
        """Delete the offloaded versions after this one: they will be published again."""
        if self._offload is not None:
            for version in self._offload.versions():
                if version > after:
                    self._offload.remove(version)

    def read(
        self, key: int, wanted: Sequence[ShardId], options: ReadOptions, targets: Sequence[np.ndarray | None] = ()
    ) -> list[ReadReply]:
        """Return index ranges, each in the cheapest form that the options allow (VersionGone: not held here)."""
        del targets  # nothing is sent
        same_host = options.host == host_identity()
        return [self._answer(key, tensor, index_range, options, same_host) for tensor, index_range in wanted]

    def _answer(
        self, key: int, tensor: str, index_range: IndexRange, options: ReadOptions, same_host: bool
    ) -> ReadReply:
        store = self.store
        if options.codec == "delta":
            arrived = self._deltas.find(key, tensor, index_range, options.base)
            if arrived is not None:
                return ReadReply("delta", arrived.digest, arrived.blob)
        self._deltas.complete(key, tensor)
        if same_host and (location := store.where(key, tensor, index_range)) is not None:
            return ReadReply("raw", "", b"", (location.segment, location.offset))
        codec = get_codec(options.codec)
        if not codec.lossless and tensor in options.unrounded:
            codec = get_codec("raw")
        base = options.base if codec.needs_base else None
        if base is not None:
            self._deltas.complete(base, tensor)
        name = (key, tensor, index_range, options.codec, base)
        # The trainer may have sent this encoding, or a reader may have asked for it, while the base was held.
        if codec.needs_base and base not in store.versions() and self._encoded.known(name) is None:
            codec = get_codec("raw")
        digest = store.digest(key, tensor, index_range) if codec.lossless else ""
        if codec.name == "raw":
            return ReadReply("raw", digest, store.read(key, tensor, index_range))

        def encode() -> bytes:
            array = store.read(key, tensor, index_range)
            return bytes(codec.encode(array, None if base is None else store.read(base, tensor, index_range)))

        blob = self._encoded.get(name, encode)
        return ReadReply(codec.name, digest or digest_of(blob), blob)


def view(memory: np.ndarray, offset: int, index_range: IndexRange, dtype: str) -> np.ndarray:
    """Return the array at an offset of uint8 memory (VersionGone: the memory ends before the array does)."""
    shape = tuple(stop - start for start, stop in index_range)
    kind = np.dtype(dtype)
    end = offset + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if end > memory.nbytes:
        raise VersionGone(f"shared memory of {memory.nbytes} bytes ends before byte {end}")
    return memory[offset:end].view(kind).reshape(shape)
