"""Whoever has pieces of the weights and gives them out: data shards of the parameter server, and workers.

The stores know versions by *keys*: each attempt to publish a version has its own, so what a trainer that died has left
half pushed is never mistaken for a part of the next attempt (see directory.py).
"""

import dataclasses
import secrets
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from rl.parameter_server.codecs import get_codec
from rl.parameter_server.digest import digest_of
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.index_ranges import Box
from rl.parameter_server.store.offload import Spill
from rl.parameter_server.store.shard_store import PieceStore
from rl.parameter_server.transport.shared_memory import Segment, host_identity

type Wanted = tuple[str, Box]  # tensor, box
type Pushed = tuple[str, Box, np.ndarray, str]  # tensor, box, array, digest


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOptions:
    """How pieces are to come.

    Attributes:
        codec: a name of `rl.parameter_server.codecs`.
        base: for codecs that need one, the key of what the reader holds. A holder without it sends the whole, raw.
        dtype: wanted by the reader where the pushed one is another; only bfloat16 for float32.
        host: the reader's `host_identity`, if it can map shared memory.
    """

    codec: str = "raw"
    base: int | None = None
    dtype: dict[str, str] = dataclasses.field(default_factory=dict)  # by tensor
    host: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One piece as it comes.

    Attributes:
        codec: how it is encoded, which may be less than was asked for.
        digest: XXH3-128 of the decoded bytes if the codec is lossless, of the encoded ones if not.
        data: the bytes; an array where nothing had to be encoded. Empty if they are to be had at `location`.
        location: name of a shared memory segment and offset in it.
    """

    codec: str
    digest: str
    data: Any
    location: tuple[str, int] | None = None


class HolderLink(Protocol):
    """A holder, here or elsewhere."""

    def read(
        self, key: int, wanted: Sequence[Wanted], options: ReadOptions, targets: Sequence[np.ndarray | None] = ()
    ) -> list[Answer]:
        """Where one of `targets` is given (uint8, of the decoded size), raw bytes that travel are put there."""
        ...


class Shard(HolderLink, Protocol):
    """A data shard of the parameter server, here or elsewhere."""

    def incarnation(self) -> str: ...
    def host(self) -> str: ...
    def write(self, key: int, pieces: Sequence[Pushed]) -> None: ...
    def adopt(self, key: int, segment: str, pieces: Sequence[tuple[str, Box, str, int, str]]) -> None: ...
    def keep(self, keys: Collection[int]) -> None: ...
    def spill(self, key: int, version: int, manifest: str) -> None: ...
    def recall(self, version: int, key: int) -> str | None: ...
    def forget_spilled(self, after: int) -> None: ...


class Holder:
    """Gives out what a store holds, encoded once for all who want the same."""

    def __init__(self, store: PieceStore, spill: Spill | None = None):
        """`spill`: where versions go that are no longer kept in memory."""
        self.store, self._spill = store, spill
        self._incarnation = secrets.token_hex(8)
        self._encoded: dict[tuple[Any, ...], Future[bytes]] = {}
        self._lock = threading.Lock()

    def incarnation(self) -> str:
        """Another one after every restart."""
        return self._incarnation

    def host(self) -> str:
        return host_identity()

    def write(self, key: int, pieces: Sequence[Pushed]) -> None:
        """Take pieces; the arrays are kept as they are.

        Raises:
            WeightsError: the bytes of one are not those of its digest; then none is taken.
        """
        for tensor, box, array, digest in pieces:
            if (found := digest_of(array)) != digest:
                raise WeightsError(f"{tensor} {box}: damaged on the way: digest {found}, expected {digest}")
        self._add(key, pieces)

    def adopt(self, key: int, segment: str, pieces: Sequence[tuple[str, Box, str, int, str]]) -> None:
        """Take pieces (tensor, box, dtype, offset, digest) that lie in shared memory, without a copy."""
        memory = Segment.attach(segment)
        arrays = [
            (tensor, box, view(memory.buffer, offset, box, dtype), digest)
            for tensor, box, dtype, offset, digest in pieces
        ]
        for tensor, box, array, digest in arrays:
            if (found := digest_of(array)) != digest:
                raise WeightsError(f"{tensor} {box}: damaged in shared memory: digest {found}, expected {digest}")
        self._add(key, arrays, memory)

    def keep(self, keys: Collection[int]) -> None:
        """Forget all versions but these."""
        self.store.drop_all_but(keys)
        with self._lock:
            for known in [known for known in self._encoded if known[0] not in keys]:
                del self._encoded[known]

    def spill(self, key: int, version: int, manifest: str) -> None:
        """Write what is held under a key to the disk or bucket, if there is one."""
        if self._spill is not None and version not in self._spill.versions():
            self._spill.save(version, manifest, self.store.pieces(key))
            self._spill.retire()

    def recall(self, version: int, key: int) -> str | None:
        """Hold a spilled version again, under a new key; its manifest as it was given, or None if there is none."""
        if self._spill is None or version not in self._spill.versions():
            return None
        manifest, pieces = self._spill.load(version)
        self.store.add(key, list(pieces))
        return manifest

    def forget_spilled(self, after: int) -> None:
        """Delete what was spilled of later versions: they will be made again."""
        if self._spill is not None:
            for version in self._spill.versions():
                if version > after:
                    self._spill.remove(version)

    def read(
        self, key: int, wanted: Sequence[Wanted], options: ReadOptions, targets: Sequence[np.ndarray | None] = ()
    ) -> list[Answer]:
        """The boxes asked for, each in the cheapest form that the options allow.

        Raises:
            VersionGone: the version is not held here.
        """
        del targets  # nothing travels
        same_host = options.host == host_identity()
        return [self._answer(key, tensor, box, options, same_host) for tensor, box in wanted]

    def _add(self, key: int, pieces: Sequence[Pushed], memory: Segment | None = None) -> None:
        """Hold pieces whose digests are verified."""
        arrays, digests = [piece[:3] for piece in pieces], [digest for *_, digest in pieces]
        self.store.add(key, arrays, keep_alive=memory, digests=digests)

    def _answer(self, key: int, tensor: str, box: Box, options: ReadOptions, same_host: bool) -> Answer:
        dtype, store = options.dtype.get(tensor), self.store
        if same_host and (location := store.where(key, tensor, box, dtype)) is not None:
            return Answer("raw", store.digest(key, tensor, box, dtype), b"", (location.segment, location.offset))
        codec = get_codec(options.codec)
        if codec.needs_base and options.base not in store.versions():
            codec = get_codec("raw")
        if codec.name == "raw":
            return Answer("raw", store.digest(key, tensor, box, dtype), store.read(key, tensor, box, dtype))
        blob = self._encode_once(key, tensor, box, dtype, codec.name, options.base if codec.needs_base else None)
        return Answer(codec.name, store.digest(key, tensor, box, dtype) if codec.lossless else digest_of(blob), blob)

    def _encode_once(self, key: int, tensor: str, box: Box, dtype: str | None, codec: str, base: int | None) -> bytes:
        name = (key, tensor, box, dtype, codec, base)
        with self._lock:
            future = self._encoded.get(name)
            mine = future is None
            if future is None:
                future = self._encoded[name] = Future()
        if mine:
            try:
                array = self.store.read(key, tensor, box, dtype)
                against = None if base is None else self.store.read(base, tensor, box, dtype)
                future.set_result(bytes(get_codec(codec).encode(array, against)))
            except BaseException as error:
                with self._lock:
                    self._encoded.pop(name, None)
                future.set_exception(error)
        return future.result()


def view(memory: np.ndarray, offset: int, box: Box, dtype: str) -> np.ndarray:
    """The array at an offset of uint8 memory.

    Raises:
        VersionGone: it does not reach that far.
    """
    shape = tuple(stop - start for start, stop in box)
    kind = np.dtype(dtype)
    end = offset + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if end > memory.nbytes:
        raise VersionGone(f"shared memory of {memory.nbytes} bytes ends before byte {end}")
    return memory[offset:end].view(kind).reshape(shape)
