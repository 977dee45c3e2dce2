"""The ledger: the state of every prompt of every step, so that each is consumed exactly once.

    pending --lease--> leased --generated--> generated --verified--> verified --consume--> consumed
       ^                  |                      |
       +---- expired, or its worker is gone -----+
       +---- handed back, with partial rollouts -+

The unit is a *work item*: the prompts of one step that are leased together. A work item that comes back is leased again
with a new lease id, and stale reports under the old id are rejected. Sampling keys depend only on the request, so the
second generation equals the lost one.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable
from typing import Literal

from rl.protocol.messages import Group, Rollout

WorkItemState = Literal["pending", "leased", "generated", "verified", "consumed"]


class LedgerError(RuntimeError):
    """A transition that would lose, split or repeat work."""


@dataclasses.dataclass(slots=True)
class WorkItem:
    """The prompts of a step that are leased together."""

    step: int
    index: int
    state: WorkItemState = "pending"
    lease: int = -1
    worker: str = ""
    leased_at: float = 0.0
    deadline: float = 0.0
    groups: tuple[Group, ...] = ()
    partial: tuple[Rollout, ...] = ()  # handed back, for the next worker to continue
    attempts: int = 0  # leases so far


@dataclasses.dataclass(slots=True)
class _Step:
    """The work items of a step that is not consumed."""

    items: list[WorkItem]
    pending: list[int]  # heap of indices of items
    unverified: int  # count of items


class Ledger:
    """All work items not yet consumed, and counts of events. Times come from the caller's clock.

    No call but `batch`, `consume`, `missing` and `counts` takes longer where there are more work items or workers.
    """

    def __init__(self, items_per_step: int, next_lease: int = 0):
        self._per_step = items_per_step
        self._steps: dict[int, _Step] = {}
        self._by_lease: dict[int, WorkItem] = {}
        self._by_worker: dict[str, dict[int, WorkItem]] = {}  # worker -> lease -> item
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline when last looked at, lease)
        self.next_lease = next_lease
        self.consumed_steps: int = 0
        self.expired = 0
        self.rejected = 0

    def lease(self, worker: str, steps: range, now: float, seconds: float) -> WorkItem | None:
        """Grant the first pending work item of the earliest of these steps."""
        if (item := self.pending(steps)) is not None:
            heapq.heappop(self._steps[item.step].pending)
            item.state, item.worker = "leased", worker
            item.lease, item.leased_at = self.next_lease, now
            item.deadline = now + seconds
            item.attempts += 1
            self._by_lease[item.lease] = self._by_worker.setdefault(worker, {})[item.lease] = item
            heapq.heappush(self._deadlines, (item.deadline, item.lease))
            self.next_lease += 1
        return item

    def pending(self, steps: range) -> WorkItem | None:
        """Return the work item that `lease` would grant."""
        states = (self._open(step) for step in steps)
        return next((state.items[state.pending[0]] for state in states if state.pending), None)

    def generated(self, lease: int) -> bool:
        """Record that the worker has the tokens; False if the lease is void."""
        item = self._current(lease)
        if item is None:
            return False
        item.state = "generated"
        return True

    def renew(self, lease: int, deadline: float) -> bool:
        """Extend the lease of a worker that is alive; False if the lease is void."""
        item = self._by_lease.get(lease)
        if item is None:
            return False
        item.deadline = max(item.deadline, deadline)
        return True

    def hand_back(self, lease: int, partial: tuple[Rollout, ...]) -> WorkItem | None:
        """Keep the partial rollouts of a worker that shuts down; a copy of the item as it was, None if void."""
        if (item := self._current(lease)) is None:
            return None
        before = dataclasses.replace(item)
        item.partial = partial
        self._free(item)
        return before

    def verified(self, lease: int, groups: tuple[Group, ...]) -> bool:
        """Accept the scored groups of a lease; False, and nothing is kept, if the lease is void."""
        item = self._current(lease)
        if item is None:
            return False
        self._end_lease(item)
        item.state, item.groups, item.partial = "verified", groups, ()
        self._steps[item.step].unverified -= 1
        return True

    def find(self, lease: int) -> WorkItem | None:
        """Return the work item of a lease; None if it is void."""
        return self._by_lease.get(lease)

    def add(self, step: int, items: int) -> None:
        """Give a step further work items, behind its others."""
        state = self._open(step)
        added = range(len(state.items), len(state.items) + items)
        state.items += [WorkItem(step, index) for index in added]
        state.pending += added  # larger than the others: still a heap
        state.unverified += items

    def complete(self, step: int) -> bool:
        """Return True if every work item of the step is verified."""
        return not self._open(step).unverified

    def batch(self, step: int) -> list[Group]:
        """Return the groups of a complete step, in the order of the plan."""
        if not self.complete(step):
            raise LedgerError(f"step {step} is not complete: {self.missing(step)}")
        return [group for item in self._open(step).items for group in item.groups]

    def consume(self, step: int) -> list[int]:
        """Record the update of this step and return its leases. Steps are consumed in order, whole, and once."""
        if step != self.consumed_steps:
            raise LedgerError(
                f"step {step} cannot be consumed: steps are consumed once and in order, "
                f"and the next is {self.consumed_steps}"
            )
        self.batch(step)
        items = self._steps.pop(step).items
        for item in items:
            item.state = "consumed"
        self.consumed_steps += 1
        return [item.lease for item in items]

    def skip_to(self, step: int) -> None:
        """Start or resume with this step; all that is not consumed is forgotten, and will be generated again."""
        self._steps.clear()
        self._by_lease.clear()
        self._by_worker.clear()
        self._deadlines.clear()
        self.consumed_steps = step

    def expire(self, now: float) -> list[WorkItem]:
        """Revoke the leases whose time is over; returns copies of their items as they were."""
        over: list[WorkItem] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease = heapq.heappop(self._deadlines)
            if (item := self._by_lease.get(lease)) is None:
                continue
            if item.deadline <= now:
                over.append(item)
            else:  # a renewed lease
                heapq.heappush(self._deadlines, (item.deadline, lease))
        return self._revoke(sorted(over, key=lambda item: item.lease))

    def next_deadline(self) -> float:
        """Return the time before which no lease expires, unless it is granted or renewed later."""
        while self._deadlines:
            when, lease = self._deadlines[0]
            item = self._by_lease.get(lease)
            if item is not None and item.deadline <= when:
                return when
            if item is None:
                heapq.heappop(self._deadlines)
            else:  # a renewed lease
                heapq.heapreplace(self._deadlines, (item.deadline, lease))
        return math.inf

    def release(self, worker: str) -> list[WorkItem]:
        """Revoke all leases of a worker that is gone; returns copies of their items as they were."""
        return self._revoke(list(self._by_worker.get(worker, {}).values()))

    def discard(self, worker: str, first: int) -> int:
        """Make what a worker has had verified pending again, in steps from `first` on; returns the work items."""
        count = 0
        for step, state in self._steps.items():
            wrong = [item for item in state.items if item.state == "verified" and item.worker == worker]
            if step < first or not wrong:
                continue
            for item in state.items[self._per_step :]:  # drawn for want of gradients
                if item.lease in self._by_lease:
                    self._end_lease(item)
            state.items = state.items[: self._per_step]
            for item in wrong:
                item.state, item.lease, item.worker, item.groups = "pending", -1, "", ()
            state.pending = [item.index for item in state.items if item.state == "pending"]  # sorted: a heap
            state.unverified = sum(item.state != "verified" for item in state.items)
            count += len(wrong)
        return count

    def missing(self, step: int, now: float | None = None) -> str:
        """Describe what a step still waits for; given the time, also for how long."""
        waiting = [_standing(item, now) for item in self._open(step).items if item.state != "verified"]
        return ", ".join(waiting) or "nothing"

    def counts(self) -> dict[str, int]:
        """Count open work items by state, steps consumed, leases expired, reports rejected."""
        counts: dict[str, int] = dict.fromkeys(("pending", "leased", "generated", "verified"), 0)
        for state in self._steps.values():
            for item in state.items:
                counts[item.state] += 1
        extra = {"expired": self.expired, "rejected": self.rejected}
        return {**counts, "consumed_steps": self.consumed_steps, **extra}

    def _open(self, step: int) -> _Step:
        if step < self.consumed_steps:
            raise LedgerError(f"step {step} was already consumed (next is {self.consumed_steps})")
        if step not in self._steps:
            items = [WorkItem(step, index) for index in range(self._per_step)]
            self._steps[step] = _Step(items, list(range(self._per_step)), self._per_step)
        return self._steps[step]

    def _current(self, lease: int) -> WorkItem | None:
        item = self._by_lease.get(lease)
        if item is None:
            self.rejected += 1
        return item

    def _revoke(self, items: Iterable[WorkItem]) -> list[WorkItem]:
        revoked: list[WorkItem] = []
        for item in items:
            revoked.append(dataclasses.replace(item))
            self._free(item)
            self.expired += 1
        return revoked

    def _free(self, item: WorkItem) -> None:
        self._end_lease(item)
        heapq.heappush(self._steps[item.step].pending, item.index)
        item.state, item.lease, item.worker, item.groups = "pending", -1, "", ()

    def _end_lease(self, item: WorkItem) -> None:
        del self._by_lease[item.lease]
        of_worker = self._by_worker[item.worker]
        del of_worker[item.lease]
        if not of_worker:
            del self._by_worker[item.worker]


def _standing(item: WorkItem, now: float | None) -> str:
    if item.state == "pending":
        return f"work item {item.index} (not leased)"
    since = "" if now is None else f", {now - item.leased_at:.0f} s since the lease"
    return f"work item {item.index} ({item.state} by {item.worker}{since})"
