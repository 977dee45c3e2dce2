"""Broadcast scheduling: guarantees under any order of joins, losses, failures and hangs, and with 1,000 workers."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl.parameter_server.broadcast import BroadcastScheduler, Grant
from rl.parameter_server.errors import WeightsError
from tests.studies.broadcast_simulation import simulate

TIMEOUT = 10.0
WORKERS = [f"w{i}" for i in range(5)]
KEYS = [("a", 1), ("a", 2), ("b", 1)]
Key = tuple[str, int]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World(RuleBasedStateMachine):
    """Workers that ask, finish, fail, fall silent and are restarted empty, with or without notice.

    `teardown` checks that none waits forever.
    """

    @initialize(fanout=st.integers(1, 3), seeds=st.integers(1, 2))
    def begin(self, fanout: int, seeds: int) -> None:
        self.clock, self.fanout, self.seeds = Clock(), fanout, seeds
        self.scheduler = BroadcastScheduler(fanout=fanout, seeds=seeds, transfer_timeout=TIMEOUT, clock=self.clock)
        self.has: set[tuple[str, Key]] = set()
        self.open: dict[int, tuple[str, Key, Grant, float]] = {}  # with the end of its patience
        self.sources: dict[Key, set[str]] = {key: set() for key in KEYS}
        self.times: Counter[str] = Counter()  # how often a worker has become a source
        self.granted: dict[int, int] = {}  # that count of its source when a grant was made
        self.losses: Counter[Key] = Counter()  # sources, and readers of the server that became none
        self.server_reads: Counter[Key] = Counter()
        self.counted: set[int] = set()

    @rule(worker=st.sampled_from(WORKERS), key=st.sampled_from(KEYS))
    def ask(self, worker: str, key: Key) -> None:
        if (worker, key) not in self.has:
            self._ask(worker, key)

    @rule(key=st.sampled_from(KEYS))
    def all_ask(self, key: Key) -> None:
        for worker in WORKERS:
            self.ask(worker, key)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), serves=st.booleans())
    def finish(self, data: st.DataObject, serves: bool) -> None:
        self._finish(data.draw(st.sampled_from(sorted(self.open))), serves)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), dead=st.booleans())
    def fail(self, data: st.DataObject, dead: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.failed(id, dead)
        source = self.open[id][2].source
        again = source is not None and self.times[source] > self.granted[id]  # it has read something since, so it lives
        self._end([id])
        assert not dead or again or all(source not in self.scheduler.sources(*key) for key in KEYS)

    @rule(worker=st.sampled_from(WORKERS), told=st.booleans())
    def restart(self, worker: str, told: bool) -> None:
        self.has = {(shard_server, key) for shard_server, key in self.has if shard_server != worker}
        if told:
            self.scheduler.forget(worker)
            self._end([id for id, (reader, *_) in self.open.items() if reader == worker])
            assert all(worker not in self.scheduler.sources(*key) for key in KEYS)

    @rule(seconds=st.integers(1, 25))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        for id, (_, key, grant, until) in self.open.items():
            if until <= self.clock.now and grant.source is None and id not in self.counted:
                self.counted.add(id)
                self.losses[key] += 1

    @rule(version=st.just(2))
    def drop_version(self, version: int) -> None:
        self.scheduler.drop_version(version)
        self.has = {(worker, key) for worker, key in self.has if key[1] != version}
        self._end([id for id, (_, key, *_) in self.open.items() if key[1] == version])

    def _ask(self, worker: str, key: Key) -> Grant | None:
        previous = [id for id, (reader, wanted, *_) in self.open.items() if (reader, wanted) == (worker, key)]
        grant = self.scheduler.grant(worker, *key)
        self._see_sources()  # now: one that asks for what it had is no source until it has it again
        if grant is None:
            assert self.scheduler.next_change() is not None or self.open, "waits for nothing"
        elif grant.id not in self.open:
            assert grant.source != worker and grant.version == key[1]
            sources = self.scheduler.sources(*key)
            assert grant.source is None or grant.source in sources, "a source that is none (any more)"
            assert grant.source is not None or not sources, "the server, though there is a source"
            self.server_reads[key] += grant.source is None
            self.granted[grant.id] = self.times[grant.source] if grant.source else 0
            patience = TIMEOUT * (self.seeds if grant.source is None else self.fanout)
            self.open[grant.id] = (worker, key, grant, self.clock.now + patience)
        self._end([id for id in previous if grant is None or id != grant.id])
        return grant

    def _see_sources(self) -> None:
        before = set().union(*self.sources.values())
        self.times.update(set().union(*(self.scheduler.sources(*key) for key in KEYS)) - before)
        for key in KEYS:
            now = set(self.scheduler.sources(*key))
            self.losses[key] += len(self.sources[key] - now)
            self.sources[key] = now

    def _finish(self, id: int, serves: bool) -> None:
        worker, key, grant, _ = self.open[id]
        if grant.source is not None and (grant.source, key) not in self.has:
            self.scheduler.failed(id, source_is_dead=True)
            return self._end([id])
        self.scheduler.done(id, serves)
        self.has.add((worker, key))
        self._end([id], lost=not serves)
        assert not serves or worker in self.scheduler.sources(*key)

    def _end(self, ids: list[int], lost: bool = True) -> None:
        for id in ids:
            _, key, grant, _ = self.open.pop(id)
            if lost and grant.source is None and id not in self.counted:
                self.losses[key] += 1

    @invariant()
    def keeps_its_promises(self) -> None:
        self.scheduler.next_change()  # what is due happens now
        self._see_sources()
        loads, from_server = Counter(), Counter()
        for _, key, grant, until in self.open.values():
            if until > self.clock.now:
                loads[grant.source] += grant.source in self.sources[key]
                from_server[key] += grant.source is None
        for key in KEYS:
            assert from_server[key] <= self.seeds
            assert self.server_reads[key] <= self.seeds + self.losses[key]
            assert all(load <= self.fanout for load in self.scheduler.sources(*key).values())
        assert all(loads[source] <= self.fanout for source in WORKERS)

    def teardown(self) -> None:
        """Let all live workers behave from now on; hung ones stay hung, restarted ones request again."""
        if not hasattr(self, "open"):
            return
        for _ in range(20 * len(WORKERS) * len(KEYS)):
            missing = [(w, key) for w in WORKERS for key in KEYS if (w, key) not in self.has]
            if not missing:
                return
            grants = [grant for want in missing if (grant := self._ask(*want)) is not None]
            for grant in grants:
                if grant.id in self.open:
                    self._finish(grant.id, serves=True)
            self.keeps_its_promises()
            if not grants:
                change = self.scheduler.next_change()
                assert change is not None and change > self.clock.now
                self.wait(math.ceil(change - self.clock.now))
        raise AssertionError(f"still waiting: {missing}")


TestAnyOrder = World.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()


def asked(scheduler: BroadcastScheduler, reader: str, version: int = 1) -> Grant:
    grant = scheduler.grant(reader, "share", version)
    assert grant is not None, f"{reader} has to wait"
    return grant


def with_sources(clock: Clock, names: str, **options: Any) -> BroadcastScheduler:
    """Each has read the share from the first of them, and that from the server."""
    scheduler = BroadcastScheduler(transfer_timeout=TIMEOUT, clock=clock, **options)
    for name in names:
        scheduler.done(asked(scheduler, name).id, serves=True)
    return scheduler


def test_first_reader_reads_from_the_server_and_others_from_readers(clock: Clock) -> None:
    scheduler = BroadcastScheduler(fanout=2, transfer_timeout=TIMEOUT, clock=clock)
    first = asked(scheduler, "a")
    assert first.source is None
    assert scheduler.grant("b", "share", 1) is None  # one reads from the server, and will be a source
    assert scheduler.grant("b", "other share", 1) is not None
    scheduler.done(first.id, serves=True)
    assert [asked(scheduler, name).source for name in "bc"] == ["a", "a"]
    assert scheduler.grant("d", "share", 1) is None


def test_least_loaded_source_is_preferred_then_the_earliest(clock: Clock) -> None:
    scheduler = with_sources(clock, "ab", fanout=2)
    assert [asked(scheduler, name).source for name in "cdef"] == ["a", "b", "a", "b"]
    assert scheduler.sources("share", 1) == {"a": 2, "b": 2}


def test_a_source_has_one_fanout_for_all_versions(clock: Clock) -> None:
    scheduler = with_sources(clock, "a", fanout=1)
    scheduler.done(asked(scheduler, "a", version=2).id, serves=True)
    assert asked(scheduler, "b", version=1).source == "a"
    assert scheduler.grant("c", "share", 2) is None


def test_asking_again_gives_the_same_grant(clock: Clock) -> None:
    scheduler = with_sources(clock, "a")
    assert asked(scheduler, "b") == asked(scheduler, "b")
    assert scheduler.sources("share", 1) == {"a": 1}


def test_asking_again_after_another_reported_the_source_dead_gives_another_source(clock: Clock) -> None:
    scheduler = with_sources(clock, "ab", fanout=2)
    first, second = asked(scheduler, "c"), asked(scheduler, "d")
    third = asked(scheduler, "e")
    assert (first.source, second.source, third.source) == ("a", "b", "a")
    scheduler.failed(first.id, source_is_dead=True)
    assert asked(scheduler, "e").source == "b"


def test_when_all_sources_are_dead_the_server_is_read_again(clock: Clock) -> None:
    scheduler = with_sources(clock, "ab", fanout=1)
    to_c, to_d = asked(scheduler, "c"), asked(scheduler, "d")
    scheduler.failed(to_c.id, source_is_dead=True)
    scheduler.failed(to_d.id, source_is_dead=True)
    assert asked(scheduler, "c").source is None
    assert scheduler.grant("d", "share", 1) is None


def test_a_reader_that_is_killed_holds_up_others_for_the_patience_at_most(clock: Clock) -> None:
    scheduler = BroadcastScheduler(transfer_timeout=TIMEOUT, clock=clock)
    asked(scheduler, "killed")
    assert scheduler.grant("b", "share", 1) is None
    assert scheduler.next_change() == clock.now + TIMEOUT
    clock.now += TIMEOUT
    assert asked(scheduler, "b").source is None


def test_a_reader_that_is_forgotten_holds_up_nobody(clock: Clock) -> None:
    scheduler = BroadcastScheduler(transfer_timeout=TIMEOUT, clock=clock)
    asked(scheduler, "killed")
    scheduler.forget("killed")
    assert asked(scheduler, "b").source is None


def test_a_slow_reader_that_finishes_after_all_is_a_source(clock: Clock) -> None:
    scheduler = BroadcastScheduler(transfer_timeout=TIMEOUT, clock=clock)
    slow = asked(scheduler, "slow")
    clock.now += 2 * TIMEOUT
    asked(scheduler, "b")
    scheduler.done(slow.id, serves=True)
    assert asked(scheduler, "c").source == "slow"


def test_a_source_that_hangs_is_given_up_when_two_readers_waited_in_vain(clock: Clock) -> None:
    scheduler = with_sources(clock, "a", fanout=2)
    assert [asked(scheduler, name).source for name in "bc"] == ["a", "a"]
    clock.now += 2 * TIMEOUT
    assert asked(scheduler, "d").source is None


def test_a_source_in_doubt_is_asked_last(clock: Clock) -> None:
    scheduler = with_sources(clock, "ab", fanout=2)
    scheduler.failed(asked(scheduler, "c").id, source_is_dead=False)
    assert [asked(scheduler, name).source for name in "defg"] == ["b", "b", "a", "a"]


def test_a_reader_that_fails_at_once_lets_others_go_first(clock: Clock) -> None:
    scheduler = BroadcastScheduler(transfer_timeout=TIMEOUT, clock=clock)
    broken = asked(scheduler, "broken")
    assert scheduler.grant("b", "share", 1) is None
    scheduler.failed(broken.id, source_is_dead=False)
    assert scheduler.grant("broken", "share", 1) is None
    change = scheduler.next_change()
    assert change is not None and clock.now < change < clock.now + TIMEOUT
    assert asked(scheduler, "b").source is None


def test_a_reader_that_fails_while_nobody_waits_may_try_again_at_once(clock: Clock) -> None:
    scheduler = BroadcastScheduler(transfer_timeout=TIMEOUT, clock=clock)
    scheduler.failed(asked(scheduler, "only").id, source_is_dead=False)
    assert asked(scheduler, "only").source is None


def test_readers_that_do_not_serve_read_one_after_the_other(clock: Clock) -> None:
    scheduler = BroadcastScheduler(transfer_timeout=TIMEOUT, clock=clock)
    for name in "abc":
        grant = asked(scheduler, name)
        assert grant.source is None
        scheduler.done(grant.id, serves=False)


def test_a_dropped_version_has_no_sources_and_late_reports_are_ignored(clock: Clock) -> None:
    scheduler = with_sources(clock, "a", fanout=1)
    late = asked(scheduler, "b")
    scheduler.drop_version(1)
    scheduler.done(late.id, serves=True)
    scheduler.failed(late.id, source_is_dead=True)
    assert scheduler.sources("share", 1) == {}
    assert scheduler.next_change() is None


@pytest.mark.parametrize("option", ["fanout", "seeds", "transfer_timeout"])
def test_options_have_to_be_positive(option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(WeightsError, match=f"{option} must be above 0, got 0"):
        BroadcastScheduler(**options)


def test_thousand_workers_without_peer_to_peer_cost_thousand_copies() -> None:
    outcome = simulate(1000, fanout=None)
    assert outcome.server_copies == pytest.approx(1000) and outcome.finished == pytest.approx(1000)


@pytest.mark.parametrize("fanout", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 8, 100, 1000])
def test_one_copy_and_logarithmic_time(workers: int, fanout: int) -> None:
    outcome = simulate(workers, fanout=fanout)
    assert outcome.server_copies == pytest.approx(1.0) and outcome.server_reads == 1
    rounds = math.ceil(math.log(workers, 1 + fanout) - 1e-9)
    assert outcome.finished <= 1 + fanout * rounds + 1e-6
    assert outcome.finished <= 1 + 2.5 * math.ceil(math.log2(workers))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fanout", [1, 2])
def test_thousand_workers_of_which_many_are_killed(fanout: int, seed: int) -> None:
    outcome = simulate(1000, fanout=fanout, death_rate=0.02, seed=seed)
    assert outcome.deaths > 100
    assert outcome.server_copies <= 4
    assert outcome.finished <= 2.2 * math.log2(1000)
