"""The ledger consumes every step once and whole, for any fate of its leases, and rejects stale reports."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rl.controller.ledger import Ledger, LedgerError
from rl.protocol.messages import Group
from tests.rl.tiny import make_group, make_prompt

ITEMS = 3
WINDOW = 2  # steps that may be leased ahead
SECONDS = 10.0
WORKERS = ("a", "b", "c")


def work(step: int, index: int, lease: int) -> tuple[Group, ...]:
    """Return the group that a worker submits; it tells its work item, and the lease under which it was made."""
    return (make_group(make_prompt(step * ITEMS + index, length=1), [[lease]], [0.0]),)


def item_of(group: Group) -> tuple[int, int]:
    return divmod(group.prompt.id, ITEMS)


def lease_of(group: Group) -> int:
    return int(group.rollouts[0].tokens[0])


@dataclasses.dataclass
class Granted:
    """A lease in the test's model."""

    id: int
    step: int
    index: int
    worker: str
    deadline: float


class LedgerMachine(RuleBasedStateMachine):
    """Random leases, expiries, deaths, late and double reports, against a model of sets."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(ITEMS)
        self.now = 0.0
        self.valid: dict[int, Granted] = {}
        self.ids: list[int] = []
        self.done: dict[tuple[int, int], int] = {}  # item -> the lease under which it was verified
        self.consumed: list[int] = []
        self.expired = self.rejected = 0

    @rule(target=leases, worker=st.sampled_from(WORKERS))
    def lease(self, worker: str) -> Granted | None:
        first = len(self.consumed)
        busy = {(g.step, g.index) for g in self.valid.values()} | self.done.keys()
        free = [(s, i) for s in range(first, first + WINDOW) for i in range(ITEMS) if (s, i) not in busy]
        item = self.ledger.lease(worker, range(first, first + WINDOW), self.now, SECONDS)
        if item is None:
            assert not free
            return None
        assert (item.step, item.index) == free[0]  # the earliest that is free, and never one that is not
        assert all(item.lease > earlier for earlier in self.ids)  # an id is never used again
        assert (item.state, item.worker, item.deadline) == ("leased", worker, self.now + SECONDS)
        self.ids.append(item.lease)
        granted = Granted(item.lease, item.step, item.index, worker, item.deadline)
        self.valid[item.lease] = granted
        return granted

    @rule(lease=leases)
    def generated(self, lease: Granted | None):
        if lease is not None:
            self._expect(self.ledger.generated(lease.id), lease.id in self.valid)

    @rule(lease=leases)
    def verified(self, lease: Granted | None):
        """Submit under any lease ever granted: in time, late or twice."""
        if lease is None:
            return
        accepted = self.ledger.verified(lease.id, work(lease.step, lease.index, lease.id))
        self._expect(accepted, lease.id in self.valid)
        if accepted:
            del self.valid[lease.id]
            self.done[lease.step, lease.index] = lease.id

    @rule(lease=consumes(leases), worker=st.sampled_from(WORKERS))
    def verified_as_another_items_work_never_happens(self, lease: Granted | None, worker: str):
        """The lease alone decides where work goes: a void id stays void when its work item is leased again."""
        if lease is not None and lease.id not in self.valid:
            self.lease(worker)
            self._expect(self.ledger.verified(lease.id, work(lease.step, lease.index, lease.id)), False)

    @rule(seconds=st.sampled_from([0.0, 4.0, SECONDS]))
    def expire(self, seconds: float):
        self.now += seconds
        self._taken(self.ledger.expire(self.now), lambda g: g.deadline <= self.now)

    @rule(worker=st.sampled_from(WORKERS))
    def release(self, worker: str):
        self._taken(self.ledger.release(worker), lambda g: g.worker == worker)

    @rule(ahead=st.integers(-1, 1))
    def consume(self, ahead: int):
        step = len(self.consumed) + ahead
        complete = all((step, i) in self.done for i in range(ITEMS))
        if ahead or not complete:
            with pytest.raises(LedgerError, match=f"step {step} "):
                self.ledger.consume(step)
        else:
            self._consume()

    @rule(back=st.integers(0, 2))
    def restart(self, back: int):
        """Restart the trainer from a checkpoint: later steps are generated again, from nothing."""
        step = max(0, len(self.consumed) - back)
        self.ledger.skip_to(step)
        self.consumed = self.consumed[:step]
        self.done.clear()
        self.valid.clear()

    @invariant()
    def counts_add_up(self):
        counts = self.ledger.counts()
        assert counts["leased"] + counts["generated"] == len(self.valid)
        assert counts["verified"] == len(self.done)
        assert sum(counts[s] for s in ("pending", "leased", "generated", "verified")) % ITEMS == 0
        assert counts["consumed_steps"] == len(self.consumed)
        assert (counts["expired"], counts["rejected"]) == (self.expired, self.rejected)

    def teardown(self):
        """Finish the work, from any state that was reached."""
        for _ in range(WINDOW):
            for worker in WORKERS:
                self.release(worker)
            while (granted := self.lease("last")) is not None:
                self.verified(granted)
            self._consume()
        assert self.consumed == list(range(len(self.consumed)))

    def _expect(self, answer: bool, expected: bool) -> None:
        assert answer == expected
        self.rejected += not expected

    def _taken(self, items: list, gone) -> None:
        lost = {g.id for g in self.valid.values() if gone(g)}
        assert {p.lease for p in items} == lost
        assert all(p.state in ("leased", "generated") for p in items)  # as they were
        self.valid = {i: g for i, g in self.valid.items() if i not in lost}
        self.expired += len(lost)

    def _consume(self) -> None:
        step = len(self.consumed)
        groups = self.ledger.batch(step)
        assert [item_of(group) for group in groups] == [(step, i) for i in range(ITEMS)]  # whole, in order
        assert [lease_of(group) for group in groups] == [self.done.pop((step, i)) for i in range(ITEMS)]
        self.ledger.consume(step)
        self.consumed.append(step)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_batch_is_in_the_order_of_the_plan_whatever_the_order_of_arrival():
    ledger = Ledger(ITEMS)
    items = [ledger.lease("a", range(1), 0.0, SECONDS) for _ in range(ITEMS)]
    leases = [(p.lease, p.index) for p in items if p is not None]
    for lease, index in reversed(leases):
        assert not ledger.complete(0)
        ledger.verified(lease, work(0, index, lease))
    assert [item_of(group) for group in ledger.batch(0)] == [(0, 0), (0, 1), (0, 2)]


def test_missing_describes_the_open_work_items():
    ledger = Ledger(ITEMS)
    for worker in ("anna", "bert"):
        assert ledger.lease(worker, range(1), 0.0, SECONDS) is not None
    ledger.generated(1)
    assert (
        ledger.missing(0) == "work item 0 (leased by anna), work item 1 (generated by bert), work item 2 (not leased)"
    )
    assert ledger.missing(0, now=31.4).startswith("work item 0 (leased by anna, 31 s since the lease), ")
    with pytest.raises(LedgerError, match="step 0 is not complete: work item 0 .leased by anna"):
        ledger.batch(0)


def test_a_consumed_step_cannot_be_leased_read_or_consumed_again():
    ledger = Ledger(1)
    assert ledger.lease("a", range(1), 0.0, SECONDS) is not None
    ledger.verified(0, work(0, 0, 0))
    assert ledger.missing(0) == "nothing"
    ledger.consume(0)
    for again in (ledger.batch, ledger.complete, ledger.missing):
        with pytest.raises(LedgerError, match="step 0 was already consumed"):
            again(0)
    with pytest.raises(LedgerError, match="the next is 1"):
        ledger.consume(0)
    with pytest.raises(LedgerError, match="step 0 was already consumed"):
        ledger.lease("a", range(1), 0.0, SECONDS)


def test_lease_ids_start_at_the_given_number():
    ledger = Ledger(1, next_lease=1000)
    item = ledger.lease("a", range(1), 0.0, SECONDS)
    assert item is not None and item.lease == 1000
