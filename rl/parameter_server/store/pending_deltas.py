"""Shards that have arrived as deltas: passed on as they came, and decoded when something else is asked for.

A worker that follows the trainer holds the version before, and gets the very bytes that the trainer has encoded. The
shards themselves are decoded for readers who want them in full, before their base is dropped, or when nothing has
arrived for a while: before that, the processor has better things to do.
"""

import contextlib
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rl.parameter_server.codecs.delta import DeltaCodec
from rl.parameter_server.codecs.layout import strip_checksum
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.index_ranges import IndexRange, describe, shape_of
from rl.parameter_server.store.shard_store import ShardStore

_IDLE = 1.0  # seconds


class DeltaShard(NamedTuple):
    """Shard as a difference to the same shard of another key; `digest` is the XXH3-128 of the decoded bytes."""

    tensor: str
    index_range: IndexRange
    dtype: str
    digest: str
    blob: bytes


class _Pending(NamedTuple):
    shard: DeltaShard
    base: int


class PendingDeltas:
    """Deltas by key, next to the store of decoded shards. Thread-safe."""

    def __init__(self, store: ShardStore, *, idle: float = _IDLE):
        """Decode into `store`, after `idle` seconds in which nothing has arrived for a key."""
        self._store, self._idle, self._codec = store, idle, DeltaCodec()
        self._pending: dict[int, dict[tuple[str, IndexRange], _Pending]] = {}
        self._timers: dict[int, threading.Timer] = {}
        self._lock = threading.Lock()
        self._decoding = threading.RLock()

    def add(self, key: int, base: int, shards: Sequence[DeltaShard]) -> None:
        """Hold shards of a key, all or none (VersionGone: no base; WeightsError: damaged, or without a digest)."""
        for shard in shards:
            strip_checksum("delta", shard.blob)
            if self._codec.digest(shard.blob) is None:
                raise WeightsError(
                    f"{shard.tensor}{describe(shard.index_range)}: not a delta with the digest of its result"
                )
        with self._lock:
            held = set(self._pending.get(base, ()))
        for shard in shards:
            if (shard.tensor, shard.index_range) not in held:
                self._check_base(base, shard)
        with self._lock:
            entry = self._pending.setdefault(key, {})
            entry |= {(shard.tensor, shard.index_range): _Pending(shard, base) for shard in shards}
            if (timer := self._timers.pop(key, None)) is not None:
                timer.cancel()
            timer = self._timers[key] = threading.Timer(self._idle, self._when_idle, (key,))
        timer.daemon = True
        timer.start()

    def find(self, key: int, tensor: str, index_range: IndexRange, base: int | None) -> DeltaShard | None:
        """Return a shard that is a delta to this base, if it has arrived as one and was not decoded yet."""
        with self._lock:
            found = self._pending.get(key, {}).get((tensor, index_range))
        return found.shard if found is not None and found.base == base else None

    def complete(self, key: int, tensor: str | None = None) -> None:
        """Decode what there is of a key, if any of it is of this tensor; None: of any (WeightsError: it is wrong)."""
        with self._lock:
            if not any(tensor in (None, name) for name, _ in self._pending.get(key, ())):
                return
        with self._decoding:
            with self._lock:
                waiting = list(self._pending.get(key, {}).values())
            for base in {one.base for one in waiting}:
                self.complete(base)
            arrays = [(one.shard.tensor, one.shard.index_range, self._decode(one)) for one in waiting]
            self._store.add(key, arrays, digests=[one.shard.digest for one in waiting])
            self._forget(key, waiting)

    def keys(self) -> list[int]:
        """Return the keys of which something is held that was not decoded yet."""
        with self._lock:
            return list(self._pending)

    def drop(self, keys: Collection[int]) -> None:
        """Drop these keys; decode first what is a delta to one of them."""
        with self._lock:
            orphaned = [
                key
                for key, entry in self._pending.items()
                if key not in keys and any(one.base in keys for one in entry.values())
            ]
        for key in orphaned:
            self._complete_or_drop(key)
        with self._lock:
            for key in keys:
                self._pending.pop(key, None)
                if (timer := self._timers.pop(key, None)) is not None:
                    timer.cancel()

    def _check_base(self, base: int, shard: DeltaShard) -> None:
        name = f"{shard.tensor}{describe(shard.index_range)}"
        try:
            held = self._store.read(base, shard.tensor, shard.index_range)
        except WeightsError as error:
            raise VersionGone(f"{name}: the base of its delta is not held here: {error}") from error
        if held.dtype.name != shard.dtype:
            raise VersionGone(f"{name}: the base of its delta is {held.dtype} here, not {shard.dtype}")

    def _decode(self, one: _Pending) -> np.ndarray:
        shard = one.shard
        base = self._store.read(one.base, shard.tensor, shard.index_range)
        array = self._codec.decode(shard.blob, shape=shape_of(shard.index_range), dtype=shard.dtype, base=base)
        found = self._codec.digest(shard.blob)
        if found != shard.digest:
            raise WeightsError(
                f"{shard.tensor}{describe(shard.index_range)}: its delta decodes to digest {found}, "
                f"expected {shard.digest}"
            )
        return array

    def _forget(self, key: int, done: Iterable[_Pending]) -> None:
        with self._lock:
            entry = self._pending.get(key, {})
            for one in done:
                if entry.get(name := (one.shard.tensor, one.shard.index_range)) is one:
                    del entry[name]
            if not entry:
                self._pending.pop(key, None)
                if (timer := self._timers.pop(key, None)) is not None:
                    timer.cancel()

    def _complete_or_drop(self, key: int) -> None:
        """Decode a key; if that fails, drop it: who wants it is refused, and the next version arrives in full."""
        try:
            self.complete(key)
        except WeightsError:
            with self._lock:
                waiting = list(self._pending.get(key, {}).values())
            self._forget(key, waiting)

    def _when_idle(self, key: int) -> None:
        with contextlib.suppress(WeightsError):  # raised again for a reader that needs it
            self.complete(key)
