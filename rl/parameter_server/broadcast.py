"""Peer-to-peer broadcast of a version: workers that have it serve it to others, so that the server sends it once.

Store and forward: a reader becomes a source when it has its whole shard set. With ``fanout`` concurrent readers per
source, the number of sources grows by a factor (1 + fanout) in the time of ``fanout`` transfers, so N readers finish in
about ``1 + fanout * log(N) / log(1 + fanout)`` transfers while the server sends ``seeds`` copies.

Scheduling only: no threads, no sockets; the caller holds a lock and asks again when something has changed.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable

from axlearn_like.run.clock import REAL
from rl.parameter_server.errors import WeightsError

# Consecutive failed reads from a source, after which it counts as hung and is dropped.
_STRIKES = 2
# A reader that failed for its own reason backs off for this fraction of `transfer_timeout`, times its consecutive
# failures, as long as others wait.
_STEP_BACK = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """Permission to read ``version`` from ``source``; None is the parameter server itself."""

    id: int
    source: str | None
    version: int


class BroadcastScheduler:
    """Sources of each (shard set, version) and the readers that they serve.

    A *shard set* names what a reader wants (index ranges and dtypes). Readers at the same position of equal meshes want
    the same one.

    Args:
        fanout: concurrent readers per source, over all its shard sets and versions.
        seeds: concurrent readers of one shard set and version at the server itself. The server serves only while there
            is no other source, so that its reads are at most ``seeds`` + sources lost + server readers lost.
        transfer_timeout: seconds for a transfer that has its source to itself. A grant expires, and its slot is free,
            after ``fanout`` (from the server: ``seeds``) times as long; a reader that finishes later still counts.
        clock: seconds; only differences matter.
        first_id: first id of grants; beyond those of a dead directory, whose readers may still report.
    """

    def __init__(
        self,
        *,
        fanout: int = 2,
        seeds: int = 1,
        transfer_timeout: float = 30.0,
        clock: Callable[[], float] = REAL,
        first_id: int = 1,
    ):
        for name, value in (("fanout", fanout), ("seeds", seeds), ("transfer_timeout", transfer_timeout)):
            if not value > 0:
                raise WeightsError(f"broadcast: {name} must be above 0, got {value}")
        self._fanout, self._seeds, self._transfer_timeout, self._clock = fanout, seeds, transfer_timeout, clock
        self._replicas: dict[tuple[str, int], _Replicas] = {}
        self._sources: dict[str, _Source] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._changes: list[tuple[float, int]] = []  # a heap of (time of a change without a report, grant or 0)
        self._ids = itertools.count(first_id)

    def grant(self, reader: str, shard_set: str, version: int) -> Grant | None:
        """Return a source to read from, or None: wait. A repeated request returns the grant that the reader has."""
        self._expire()
        replicas = self._replicas.setdefault((shard_set, version), _Replicas())
        if (held := replicas.transfers.get(reader)) is not None:
            if held.live and (held.source is None or held.source.name in replicas.sources):
                return held.grant
            self._end(held)
        if reader in replicas.sources:  # requests what it had, so it was restarted
            self._drop_source(self._sources[reader])
        if replicas.steps_back(reader, self._clock()) or (place := self._place(replicas)) is _NOWHERE:
            replicas.waiting.add(reader)
            return None
        replicas.waiting.discard(reader)
        return self._begin(replicas, reader, place, version).grant

    def done(self, grant_id: int, serves: bool) -> None:
        """Record that the reader has its shard set, and is a source if it ``serves``. Unknown grants are ignored."""
        self._expire()
        if (transfer := self._transfers.get(grant_id)) is None:
            return
        self._end(transfer)
        replicas = transfer.replicas
        replicas.failures.pop(transfer.reader, None)
        if transfer.source is not None:
            transfer.source.strikes = 0
        if serves:
            source = self._sources.setdefault(transfer.reader, _Source(transfer.reader, next(self._ids)))
            source.strikes = 0
            if replicas not in source.replicas:
                source.replicas.append(replicas)
            replicas.sources[source.name] = source
            self._note_load(source)

    def failed(self, grant_id: int, source_is_dead: bool) -> None:
        """Record that the reader got nothing. A source that is dead, or no longer has the version, is dropped."""
        self._expire()
        if (transfer := self._transfers.get(grant_id)) is None:
            return
        self._end(transfer)
        if source_is_dead:
            if transfer.source is not None:
                self._drop_source(transfer.source)
            return
        if transfer.live:  # otherwise it has expired, and the source has its strike
            self._strike(transfer.source)
        until = self._clock() + transfer.replicas.count_failure(transfer.reader) * _STEP_BACK * self._transfer_timeout
        transfer.replicas.back_off[transfer.reader] = until
        heapq.heappush(self._changes, (until, 0))

    def forget(self, worker: str) -> None:
        """Remove a dead worker as reader and source. Its readers report their failures themselves."""
        for transfer in [t for t in self._transfers.values() if t.reader == worker]:
            self._end(transfer)
        for replicas in self._replicas.values():
            replicas.waiting.discard(worker)
        if worker in self._sources:
            self._drop_source(self._sources[worker])

    def drop_version(self, version: int) -> None:
        """End the broadcast of ``version``. Transfers in progress are forgotten, not stopped."""
        for key in [key for key in self._replicas if key[1] == version]:
            replicas = self._replicas.pop(key)
            for transfer in list(replicas.transfers.values()):
                self._end(transfer)
            for source in replicas.sources.values():
                source.replicas.remove(replicas)

    def next_change(self) -> float | None:
        """Return the time when a waiting reader may get a source although nothing is reported until then."""
        self._expire()
        while self._changes:
            when, grant_id = self._changes[0]
            if grant_id == 0 or grant_id in self._transfers:
                return when
            heapq.heappop(self._changes)
        return None

    def sources(self, shard_set: str, version: int) -> dict[str, int]:
        """Return the serving workers, with the number of readers that each has (over all that it serves)."""
        replicas = self._replicas.get((shard_set, version), _Replicas())
        return {name: source.load for name, source in replicas.sources.items()}

    def _place(self, replicas: "_Replicas") -> "_Source | None":
        if replicas.free:
            return min(replicas.free.values(), key=lambda source: (source.strikes, source.load, source.order))
        if replicas.sources or replicas.from_server >= self._seeds:
            return _NOWHERE
        return None

    def _begin(self, replicas: "_Replicas", reader: str, source: "_Source | None", version: int) -> "_Transfer":
        grant = Grant(next(self._ids), source.name if source else None, version)
        readers = self._fanout if source else self._seeds
        transfer = _Transfer(grant, reader, source, replicas)
        self._transfers[grant.id] = replicas.transfers[reader] = transfer
        heapq.heappush(self._changes, (self._clock() + readers * self._transfer_timeout, grant.id))
        self._add_load(transfer, 1)
        return transfer

    def _end(self, transfer: "_Transfer") -> None:
        del self._transfers[transfer.grant.id]
        del transfer.replicas.transfers[transfer.reader]
        if transfer.live:
            self._add_load(transfer, -1)

    def _expire(self) -> None:
        """Expire the grants whose time is up. They are kept, since their readers may be slow and not dead."""
        now = self._clock()
        while self._changes and self._changes[0][0] <= now:
            transfer = self._transfers.get(heapq.heappop(self._changes)[1])
            if transfer is not None:
                transfer.live = False
                self._add_load(transfer, -1)
                self._strike(transfer.source)

    def _add_load(self, transfer: "_Transfer", change: int) -> None:
        if transfer.source is None:
            transfer.replicas.from_server += change
        else:
            transfer.source.load += change
            self._note_load(transfer.source)

    def _note_load(self, source: "_Source") -> None:
        for replicas in source.replicas:
            if source.load < self._fanout:
                replicas.free[source.name] = source
            else:
                replicas.free.pop(source.name, None)

    def _strike(self, source: "_Source | None") -> None:
        if source is not None:
            source.strikes += 1
            if source.strikes >= _STRIKES:
                self._drop_source(source)

    def _drop_source(self, source: "_Source") -> None:
        for replicas in source.replicas:
            replicas.sources.pop(source.name)
            replicas.free.pop(source.name, None)
        source.replicas.clear()
        if self._sources.get(source.name) is source:  # same process, not a restarted worker of that name
            del self._sources[source.name]


@dataclasses.dataclass(eq=False, slots=True)
class _Source:
    name: str
    order: int  # order of becoming a source
    load: int = 0  # current readers
    strikes: int = 0  # consecutive failed reads
    replicas: "list[_Replicas]" = dataclasses.field(default_factory=list)


_NOWHERE = _Source("", 0)  # no free slot; None is the server


@dataclasses.dataclass(eq=False, slots=True)
class _Transfer:
    """Grant with its two ends; ``live`` until it expires."""

    grant: Grant
    reader: str
    source: _Source | None
    replicas: "_Replicas"
    live: bool = True


@dataclasses.dataclass(eq=False, slots=True)
class _Replicas:
    """Sources, readers and waiting readers of one shard set of one version."""

    sources: dict[str, _Source] = dataclasses.field(default_factory=dict)
    free: dict[str, _Source] = dataclasses.field(default_factory=dict)  # sources with a free slot
    transfers: dict[str, _Transfer] = dataclasses.field(default_factory=dict)  # reader -> transfer
    from_server: int = 0  # live transfers from the server
    waiting: set[str] = dataclasses.field(default_factory=set)
    failures: dict[str, int] = dataclasses.field(default_factory=dict)  # consecutive, by reader
    back_off: dict[str, float] = dataclasses.field(default_factory=dict)

    def steps_back(self, reader: str, now: float) -> bool:
        """Return True while a failed reader backs off, so that it does not keep the only slot from the others."""
        return now < self.back_off.get(reader, now) and bool(self.waiting - {reader})

    def count_failure(self, reader: str) -> int:
        self.failures[reader] = self.failures.get(reader, 0) + 1
        return self.failures[reader]
