"""Serving of shards: by the shard servers of the parameter server, and by workers to their peers.

Stores know versions by *keys*: each attempt to publish a version has its own, so shards that a dead trainer has pushed
are never mixed with those of the next attempt (see directory.py).
"""

import dataclasses
import secrets
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from rl.parameter_server.codecs import get_codec
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import digest_of
from rl.parameter_server.index_ranges import IndexRange
from rl.parameter_server.store.offload import OffloadStore
from rl.parameter_server.store.pending_deltas import DeltaShard, PendingDeltas
from rl.parameter_server.store.shard_store import ShardStore
from rl.parameter_server.transport.shared_memory import SharedSegment, host_identity

type ShardId = tuple[str, IndexRange]  # tensor, index range
type ShardData = tuple[str, IndexRange, np.ndarray, str]  # tensor, index range, array, digest
type SharedShard = tuple[str, IndexRange, str, int]  # tensor, index range, dtype, offset in the segment


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read.

    Attributes:
        codec: a name of `rl.parameter_server.codecs`.
        base: for delta codecs, the key of the version that the reader holds. A server without it sends raw shards.
        unrounded: tensors that come raw instead of by an approximate codec.
        dtype: by tensor, the reader's dtype where it differs from the pushed one; only bfloat16 for float32.
        host: the reader's `host_identity`, if it can map shared memory.
    """

    codec: str = "raw"
    base: int | None = None
    unrounded: tuple[str, ...] = ()
    dtype: dict[str, str] = dataclasses.field(default_factory=dict)  # tensor -> dtype
    host: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReadReply:
    """Data of one index range.

    Attributes:
        codec: its encoding; "raw" where the requested codec was not possible.
        digest: XXH3-128 of the decoded bytes if the codec is lossless, of the encoded ones if not; empty for what has
            not moved, at `location`.
        data: the bytes; an array where nothing had to be encoded. Empty if they are at `location`.
        location: name of a shared memory segment and offset in it.
    """

    codec: str
    digest: str
    data: Any
    location: tuple[str, int] | None = None


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


class LocalShardServer:
    """Server of the shards in a store; each encoding is computed once for all readers."""

    def __init__(self, store: ShardStore, offload: OffloadStore | None = None):
        """Serve `store`; versions evicted from memory go to `offload`."""
        self.store, self._offload, self._deltas = store, offload, PendingDeltas(store)
        self._incarnation = secrets.token_hex(8)
        self._encoded: dict[tuple[Any, ...], Future[bytes]] = {}
        self._lock = threading.Lock()

    def incarnation(self) -> str:
        """Return a random name that differs after every restart."""
        return self._incarnation

    def host(self) -> str:
        """Return the `host_identity` of its process."""
        return host_identity()

    def write(self, key: int, shards: Sequence[ShardData]) -> None:
        """Store shards; the arrays are kept without a copy.

        Raises:
            WeightsError: a digest does not match; then no shard is stored.
        """
        for tensor, index_range, array, digest in shards:
            if (found := digest_of(array)) != digest:
                raise WeightsError(f"{tensor} {index_range}: damaged in transit: digest {found}, expected {digest}")
        arrays, digests = [shard[:3] for shard in shards], [digest for *_, digest in shards]
        self.store.add(key, arrays, digests=digests)

    def write_deltas(self, key: int, base: int, shards: Sequence[DeltaShard]) -> None:
        """Hold shards that are deltas (codec `delta`) to those of another key, to pass them on (see PendingDeltas).

        Raises:
            VersionGone: the other key is not held here with these shards. WeightsError: a delta is damaged.
        """
        self._deltas.add(key, base, shards)
        for shard in shards:
            encoded: Future[bytes] = Future()
            encoded.set_result(shard.blob)
            with self._lock:
                self._encoded[key, shard.tensor, shard.index_range, None, "delta", base] = encoded

    def adopt(self, key: int, segment: str, shards: Sequence[SharedShard]) -> None:
        """Store shards that lie in shared memory, without a copy.

        Nothing has moved, so nothing is read here: digests are computed when a reader asks who cannot map the memory.
        """
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
        with self._lock:
            encoded = {known[0] for known in self._encoded}
        return sorted({*self.store.versions(), *self._deltas.keys(), *encoded})

    def drop(self, keys: Collection[int]) -> None:
        """Drop these versions; deltas to one of them are decoded first, which may take seconds."""
        self._deltas.drop(keys)
        for key in keys:
            self.store.drop(key)
        with self._lock:
            for known in [known for known in self._encoded if known[0] in keys]:
                del self._encoded[known]

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
        """Return the requested index ranges, each in the cheapest form that the options allow.

        Raises:
            VersionGone: the version is not held here.
        """
        del targets  # nothing is sent
        same_host = options.host == host_identity()
        return [self._answer(key, tensor, index_range, options, same_host) for tensor, index_range in wanted]

    def _answer(
        self, key: int, tensor: str, index_range: IndexRange, options: ReadOptions, same_host: bool
    ) -> ReadReply:
        dtype, store = options.dtype.get(tensor), self.store
        if options.codec == "delta" and dtype is None:
            arrived = self._deltas.find(key, tensor, index_range, options.base)
            if arrived is not None:
                return ReadReply("delta", arrived.digest, arrived.blob)
        self._deltas.complete(key, tensor)
        if same_host and (location := store.where(key, tensor, index_range, dtype)) is not None:
            return ReadReply("raw", "", b"", (location.segment, location.offset))
        codec = get_codec(options.codec)
        if not codec.lossless and tensor in options.unrounded:
            codec = get_codec("raw")
        if codec.needs_base and options.base is not None:
            self._deltas.complete(options.base, tensor)
        encoded = (key, tensor, index_range, dtype, codec.name, options.base)
        if codec.needs_base and options.base not in store.versions() and not self._is_encoded(encoded):
            codec = get_codec("raw")
        if codec.name == "raw":
            return ReadReply(
                "raw", store.digest(key, tensor, index_range, dtype), store.read(key, tensor, index_range, dtype)
            )
        blob = self._encode_once(
            key, tensor, index_range, dtype, codec.name, options.base if codec.needs_base else None
        )
        return ReadReply(
            codec.name, store.digest(key, tensor, index_range, dtype) if codec.lossless else digest_of(blob), blob
        )

    def _is_encoded(self, name: tuple[Any, ...]) -> bool:
        """Return True if the trainer has sent this encoding or a reader has asked for it, while the base was held."""
        with self._lock:
            future = self._encoded.get(name)
        return future is not None and future.done()

    def _encode_once(
        self, key: int, tensor: str, index_range: IndexRange, dtype: str | None, codec: str, base: int | None
    ) -> bytes:
        name = (key, tensor, index_range, dtype, codec, base)
        with self._lock:
            future = self._encoded.get(name)
            mine = future is None
            if future is None:
                future = self._encoded[name] = Future()
        if mine:
            try:
                array = self.store.read(key, tensor, index_range, dtype)
                against = None if base is None else self.store.read(base, tensor, index_range, dtype)
                future.set_result(bytes(get_codec(codec).encode(array, against)))
            except BaseException as error:
                with self._lock:
                    self._encoded.pop(name, None)
                future.set_exception(error)
        return future.result()


def view(memory: np.ndarray, offset: int, index_range: IndexRange, dtype: str) -> np.ndarray:
    """Return the array at an offset of uint8 memory.

    Raises:
        VersionGone: the memory ends before the array does.
    """
    shape = tuple(stop - start for start, stop in index_range)
    kind = np.dtype(dtype)
    end = offset + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if end > memory.nbytes:
        raise VersionGone(f"shared memory of {memory.nbytes} bytes ends before byte {end}")
    return memory[offset:end].view(kind).reshape(shape)
