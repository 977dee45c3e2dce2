"""Discrete-event simulation of a peer-to-peer broadcast, with the scheduler that the directory uses."""

import dataclasses
import heapq
import itertools
import math
import random
from typing import Any

from rl.parameter_server.broadcast import BroadcastScheduler, Grant


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulation. `finished` is in transfers: the time of one shard set over an idle worker NIC."""

    finished: float
    server_copies: float  # sent by the server, parts of broken transfers included
    server_reads: int
    deaths: int


def simulate(
    workers: int,
    *,
    fanout: int | None = 2,
    seeds: int = 1,
    server_egress: float = 1.0,
    stream: float = 1.0,
    death_rate: float = 0.0,
    transfer_timeout: float = 4.0,
    seed: int = 0,
) -> Outcome:
    """Simulate workers that all request one shard set at time 0.

    Bandwidths are in units of a worker's NIC, times in transfers.

    Args:
        workers: their number.
        fanout: as in `BroadcastScheduler`; None: no broadcast, all read from the server at once.
        seeds: as in `BroadcastScheduler`.
        server_egress: bandwidth of the server for this shard set.
        stream: largest bandwidth of one transfer.
        death_rate: deaths per worker and transfer time, without notice. Its readers see it at once and request again;
            what it was reading is noticed only after `transfer_timeout`. A new worker takes its place and reads, too;
            the simulation ends when the survivors of time 0 have the shard set.
        transfer_timeout: as in `BroadcastScheduler`.
        seed: seed of the random deaths.
    """
    broadcast = {"fanout": fanout, "seeds": seeds, "transfer_timeout": transfer_timeout} if fanout else None
    return _Simulation(workers, broadcast, server_egress, stream, death_rate, random.Random(seed)).run()


class _Link:
    """Outgoing side of a source, shared equally by its readers; `work` counts the transfers done for each of them."""

    def __init__(self, egress: float, stream: float):
        self.egress, self.stream = egress, stream
        self.readers: dict[str, float] = {}  # what `work` will be when each is done
        self.work = self.sent = self.time = 0.0

    def rate(self) -> float:
        return min(self.egress / len(self.readers), self.stream) if self.readers else 0.0

    def advance(self, now: float) -> None:
        step = (now - self.time) * self.rate()
        self.work, self.sent, self.time = self.work + step, self.sent + step * len(self.readers), now

    def next_done(self) -> tuple[float, str] | None:
        if not self.readers:
            return None
        reader, work = next(iter(self.readers.items()))  # first come, first done: equal sizes, equal parts
        return self.time + max(work - self.work, 0.0) / self.rate(), reader


class _Simulation:
    def __init__(
        self,
        workers: int,
        broadcast: dict[str, Any] | None,
        server_egress: float,
        stream: float,
        death_rate: float,
        rng: random.Random,
    ):
        self.now, self.stream, self.rng, self.death_rate = 0.0, stream, rng, death_rate
        self.scheduler = BroadcastScheduler(**broadcast, clock=lambda: self.now) if broadcast else None
        self.links: dict[str | None, _Link] = {None: _Link(server_egress, stream)}
        self.waiting = [f"worker {i}" for i in range(workers)]
        self.alive = list(self.waiting)
        self.missing = set(self.waiting)
        self.grants: dict[str, Grant] = {}
        self.done_at: list[tuple[float, int, str | None]] = []  # a heap; stale entries are skipped
        self.ids = itertools.count(1)
        self.deaths = self.server_reads = 0

    def run(self) -> Outcome:
        next_death = self._death_time()
        while self.missing:
            self._start()
            change = self.scheduler.next_change() if self.scheduler else None
            times = [next_death, self.done_at[0][0] if self.done_at else math.inf, change or math.inf]
            self.now = max(self.now, min(times))
            if self.now == times[1]:
                self._finish(heapq.heappop(self.done_at)[2])
            elif self.now == times[0]:
                self._die(self.rng.choice(self.alive))
                next_death = self._death_time()
        server = self.links[None]
        server.advance(self.now)
        return Outcome(self.now, server.sent, self.server_reads, self.deaths)

    def _death_time(self) -> float:
        rate = self.death_rate * len(self.alive)
        return self.now + self.rng.expovariate(rate) if rate else math.inf

    def _start(self) -> None:
        while self.waiting:
            reader = self.waiting[0]
            grant = self.scheduler.grant(reader, "shard set", 1) if self.scheduler else Grant(0, None, 1)
            if grant is None:
                return
            if grant.source not in self.links and self.scheduler:  # it died unnoticed: connecting fails
                self.scheduler.failed(grant.id, source_is_dead=True)
                continue
            self.waiting.pop(0)
            self.grants[reader] = grant
            self.server_reads += grant.source is None
            link = self.links[grant.source]
            link.advance(self.now)
            link.readers[reader] = link.work + 1.0
            self._schedule(grant.source)

    def _schedule(self, source: str | None) -> None:
        if (upcoming := self.links[source].next_done()) is not None:
            heapq.heappush(self.done_at, (upcoming[0], next(self.ids), source))

    def _finish(self, source: str | None) -> None:
        link = self.links.get(source)
        upcoming = link.next_done() if link else None
        if link is None or upcoming is None or upcoming[0] > self.now + 1e-9:
            return
        reader = upcoming[1]
        link.advance(self.now)
        del link.readers[reader]
        self._schedule(source)
        self.missing.discard(reader)
        self.links[reader] = _Link(1.0, self.stream)
        grant = self.grants.pop(reader)
        if self.scheduler:
            self.scheduler.done(grant.id, serves=True)

    def _die(self, worker: str) -> None:
        self.deaths += 1
        self.alive[self.alive.index(worker)] = successor = f"successor {self.deaths}"
        self.missing.discard(worker)
        if worker in self.waiting:
            self.waiting.remove(worker)
        self.waiting.append(successor)
        if (grant := self.grants.pop(worker, None)) is not None:
            link = self.links[grant.source]
            link.advance(self.now)
            del link.readers[worker]
            self._schedule(grant.source)
        if (served := self.links.pop(worker, None)) is not None and self.scheduler:
            for reader in served.readers:
                self.scheduler.failed(self.grants.pop(reader).id, source_is_dead=True)
                self.waiting.append(reader)
