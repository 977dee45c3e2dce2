"""Who reads a version from whom: workers that have it serve it to others, so that the parameter server sends it once.

Store and forward: a reader becomes a source when it has its whole share. With places for ``fanout`` readers at each
source the number of holders grows by a factor (1 + fanout) in the time of ``fanout`` transfers, so that N readers are
done in about ``1 + fanout * log(N) / log(1 + fanout)`` transfers while the server sends ``seeds`` copies.

This is policy only: no threads, no sockets; the caller holds a lock and asks again when something changed.
"""

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable

from rl.parameter_server.errors import WeightsError

# Readers in a row that got nothing from a source, after which it is taken for hung and is a source no longer.
_STRIKES = 2
# A reader that failed for a reason of its own lets others go first for this part of the patience, times its failures.
_STEP_BACK = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """Leave to read ``version`` from ``source``; None is the parameter server's own shards."""

    id: int
    source: str | None
    version: int


class Relays:
    """The sources of each (share, version) and the readers that they serve.

    A *share* names what is wanted (boxes and dtype); readers at the same position of equal meshes want the same one.

    Args:
        fanout: readers that a holder serves at once, over all its shares and versions.
        seeds: readers of one share and version that the server itself serves at once. It serves only while there is
            no other source, so that its reads are at most ``seeds`` + sources lost + server readers lost.
        patience: seconds that a transfer may take that has its source to itself. A grant is void, and its place free,
            after ``fanout`` (from the server: ``seeds``) times as long; a reader that finishes later still counts.
        clock: seconds; only differences matter.
        first_id: of grants; beyond those of a directory that died, whose readers may still report.
    """

    def __init__(
        self,
        *,
        fanout: int = 2,
        seeds: int = 1,
        patience: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        first_id: int = 1,
    ):
        for name, value in (("fanout", fanout), ("seeds", seeds), ("patience", patience)):
            if not value > 0:
                raise WeightsError(f"relays: {name} must be above 0, got {value}")
        self._fanout, self._seeds, self._patience, self._clock = fanout, seeds, patience, clock
        self._copies: dict[tuple[str, int], _Copies] = {}
        self._holders: dict[str, _Holder] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._changes: list[tuple[float, int]] = []  # a heap: when something changes by itself, the grant or 0
        self._ids = itertools.count(first_id)

    def grant(self, reader: str, share: str, version: int) -> Grant | None:
        """A place to read from, or None: wait. Asked again, a reader gets the grant that it already has."""
        self._expire()
        copies = self._copies.setdefault((share, version), _Copies())
        if (held := copies.transfers.get(reader)) is not None:
            if held.live and (held.source is None or held.source.name in copies.sources):
                return held.grant
            self._end(held)
        if reader in copies.sources:  # it asks for what it had: it was restarted
            self._drop_source(self._holders[reader])
        if copies.steps_back(reader, self._clock()) or (place := self._place(copies)) is _NOWHERE:
            copies.waiting.add(reader)
            return None
        copies.waiting.discard(reader)
        return self._begin(copies, reader, place, version).grant

    def done(self, grant_id: int, serves: bool) -> None:
        """The reader has its share; if it ``serves``, it is a source from now on. Unknown grants are ignored."""
        self._expire()
        if (transfer := self._transfers.get(grant_id)) is None:
            return
        self._end(transfer)
        copies = transfer.copies
        copies.failures.pop(transfer.reader, None)
        if transfer.source is not None:
            transfer.source.strikes = 0
        if serves:
            holder = self._holders.setdefault(transfer.reader, _Holder(transfer.reader, next(self._ids)))
            holder.strikes = 0
            if copies not in holder.copies:
                holder.copies.append(copies)
            copies.sources[holder.name] = holder
            self._note_load(holder)

    def failed(self, grant_id: int, source_is_dead: bool) -> None:
        """The reader got nothing. A source that is dead, or has not the version any more, is none from now on."""
        self._expire()
        if (transfer := self._transfers.get(grant_id)) is None:
            return
        self._end(transfer)
        if source_is_dead:
            if transfer.source is not None:
                self._drop_source(transfer.source)
            return
        if transfer.live:  # otherwise its time was up and the source has its strike
            self._strike(transfer.source)
        until = self._clock() + transfer.copies.count_failure(transfer.reader) * _STEP_BACK * self._patience
        transfer.copies.back_off[transfer.reader] = until
        heapq.heappush(self._changes, (until, 0))

    def forget(self, holder: str) -> None:
        """A worker is gone: it reads no more and is no source. Its readers report their failures themselves."""
        for transfer in [t for t in self._transfers.values() if t.reader == holder]:
            self._end(transfer)
        for copies in self._copies.values():
            copies.waiting.discard(holder)
        if holder in self._holders:
            self._drop_source(self._holders[holder])

    def drop_version(self, version: int) -> None:
        """Nobody is to read ``version`` any more. Transfers under way are forgotten, not stopped."""
        for key in [key for key in self._copies if key[1] == version]:
            copies = self._copies.pop(key)
            for transfer in list(copies.transfers.values()):
                self._end(transfer)
            for holder in copies.sources.values():
                holder.copies.remove(copies)

    def next_change(self) -> float | None:
        """When, on the clock, a waiting reader may get a place although nothing is reported until then."""
        self._expire()
        while self._changes:
            when, grant_id = self._changes[0]
            if grant_id == 0 or grant_id in self._transfers:
                return when
            heapq.heappop(self._changes)
        return None

    def sources(self, share: str, version: int) -> dict[str, int]:
        """The workers that serve, with the number of readers that each has now (over all that it serves)."""
        copies = self._copies.get((share, version), _Copies())
        return {name: holder.load for name, holder in copies.sources.items()}

    def _place(self, copies: "_Copies") -> "_Holder | None":
        if copies.free:
            return min(copies.free.values(), key=lambda holder: (holder.strikes, holder.load, holder.order))
        if copies.sources or copies.from_server >= self._seeds:
            return _NOWHERE
        return None

    def _begin(self, copies: "_Copies", reader: str, source: "_Holder | None", version: int) -> "_Transfer":
        grant = Grant(next(self._ids), source.name if source else None, version)
        readers = self._fanout if source else self._seeds
        transfer = _Transfer(grant, reader, source, copies)
        self._transfers[grant.id] = copies.transfers[reader] = transfer
        heapq.heappush(self._changes, (self._clock() + readers * self._patience, grant.id))
        self._add_load(transfer, 1)
        return transfer

    def _end(self, transfer: "_Transfer") -> None:
        del self._transfers[transfer.grant.id]
        del transfer.copies.transfers[transfer.reader]
        if transfer.live:
            self._add_load(transfer, -1)

    def _expire(self) -> None:
        """Voids the grants whose time is up. They are kept, since their readers may be slow and not dead."""
        now = self._clock()
        while self._changes and self._changes[0][0] <= now:
            transfer = self._transfers.get(heapq.heappop(self._changes)[1])
            if transfer is not None:
                transfer.live = False
                self._add_load(transfer, -1)
                self._strike(transfer.source)

    def _add_load(self, transfer: "_Transfer", change: int) -> None:
        if transfer.source is None:
            transfer.copies.from_server += change
        else:
            transfer.source.load += change
            self._note_load(transfer.source)

    def _note_load(self, holder: "_Holder") -> None:
        for copies in holder.copies:
            if holder.load < self._fanout:
                copies.free[holder.name] = holder
            else:
                copies.free.pop(holder.name, None)

    def _strike(self, source: "_Holder | None") -> None:
        if source is not None:
            source.strikes += 1
            if source.strikes >= _STRIKES:
                self._drop_source(source)

    def _drop_source(self, holder: "_Holder") -> None:
        for copies in holder.copies:
            copies.sources.pop(holder.name)
            copies.free.pop(holder.name, None)
        holder.copies.clear()
        if self._holders.get(holder.name) is holder:  # not the next life of a worker of that name
            del self._holders[holder.name]


@dataclasses.dataclass(eq=False, slots=True)
class _Holder:
    """A worker that serves."""

    name: str
    order: int  # of its becoming a source
    load: int = 0  # readers now
    strikes: int = 0  # readers in a row that got nothing
    copies: "list[_Copies]" = dataclasses.field(default_factory=list)


_NOWHERE = _Holder("", 0)  # no place; None is the server's


@dataclasses.dataclass(eq=False, slots=True)
class _Transfer:
    """A grant and who is at its ends; ``live`` until its time is up."""

    grant: Grant
    reader: str
    source: _Holder | None
    copies: "_Copies"
    live: bool = True


@dataclasses.dataclass(eq=False, slots=True)
class _Copies:
    """One share of one version: who has it, who reads it, who waits for it."""

    sources: dict[str, _Holder] = dataclasses.field(default_factory=dict)
    free: dict[str, _Holder] = dataclasses.field(default_factory=dict)  # sources with a place left
    transfers: dict[str, _Transfer] = dataclasses.field(default_factory=dict)  # by reader
    from_server: int = 0  # live transfers from the server
    waiting: set[str] = dataclasses.field(default_factory=set)
    failures: dict[str, int] = dataclasses.field(default_factory=dict)  # of a reader, in a row
    back_off: dict[str, float] = dataclasses.field(default_factory=dict)

    def steps_back(self, reader: str, now: float) -> bool:
        """A reader that fails at once and asks at once must not keep the only place from the others."""
        return now < self.back_off.get(reader, now) and bool(self.waiting - {reader})

    def count_failure(self, reader: str) -> int:
        self.failures[reader] = self.failures.get(reader, 0) + 1
        return self.failures[reader]
