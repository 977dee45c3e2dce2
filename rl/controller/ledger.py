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
from collections.abc import Callable
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


class Ledger:
    """All work items not yet consumed, and counts of events. Times come from the caller's clock."""

    def __init__(self, items_per_step: int, next_lease: int = 0):
        self._per_step = items_per_step
        self._steps: dict[int, list[WorkItem]] = {}
        self._by_lease: dict[int, WorkItem] = {}
        self.next_lease = next_lease
        self.consumed_steps: int = 0
        self.expired = 0
        self.rejected = 0

    def lease(self, worker: str, steps: range, now: float, seconds: float) -> WorkItem | None:
        """Grant the first pending work item of the earliest of these steps."""
        if (item := self.pending(steps)) is not None:
            item.state, item.worker = "leased", worker
            item.lease, item.leased_at = self.next_lease, now
            item.deadline = now + seconds
            item.attempts += 1
            self._by_lease[self.next_lease] = item
            self.next_lease += 1
        return item

    def pending(self, steps: range) -> WorkItem | None:
        """Return the work item that `lease` would grant."""
        return next((item for step in steps for item in self._open(step) if item.state == "pending"), None)

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
        item.state, item.groups, item.partial = "verified", groups, ()
        del self._by_lease[lease]
        return True

    def step_of(self, lease: int) -> int | None:
        """Return the step of a lease; None if it is void."""
        item = self._by_lease.get(lease)
        return None if item is None else item.step

    def add(self, step: int, items: int) -> None:
        """Give a step further work items, behind its others."""
        held = self._open(step)
        held += [WorkItem(step, len(held) + i) for i in range(items)]

    def complete(self, step: int) -> bool:
        """Return True if every work item of the step is verified."""
        return all(item.state == "verified" for item in self._open(step))

    def batch(self, step: int) -> list[Group]:
        """Return the groups of a complete step, in the order of the plan."""
        if not self.complete(step):
            raise LedgerError(f"step {step} is not complete: {self.missing(step)}")
        return [group for item in self._open(step) for group in item.groups]

    def consume(self, step: int) -> list[int]:
        """Record the update of this step and return its leases. Steps are consumed in order, whole, and once."""
        if step != self.consumed_steps:
            raise LedgerError(
                f"step {step} cannot be consumed: steps are consumed once and in order, "
                f"and the next is {self.consumed_steps}"
            )
        self.batch(step)
        items = self._steps.pop(step)
        for item in items:
            item.state = "consumed"
        self.consumed_steps += 1
        return [item.lease for item in items]

    def skip_to(self, step: int) -> None:
        """Start or resume with this step; all that is not consumed is forgotten, and will be generated again."""
        self._steps.clear()
        self._by_lease.clear()
        self.consumed_steps = step

    def expire(self, now: float) -> list[WorkItem]:
        """Revoke the leases whose time is over; returns copies of their items as they were."""
        return self._revoke(lambda item: item.deadline <= now)

    def release(self, worker: str) -> list[WorkItem]:
        """Revoke all leases of a worker that is gone; returns copies of their items as they were."""
        return self._revoke(lambda item: item.worker == worker)

    def missing(self, step: int, now: float | None = None) -> str:
        """Describe what a step still waits for; given the time, also for how long."""
        waiting = [_standing(item, now) for item in self._open(step) if item.state != "verified"]
        return ", ".join(waiting) or "nothing"

    def counts(self) -> dict[str, int]:
        """Count open work items by state, steps consumed, leases expired, reports rejected."""
        counts: dict[str, int] = dict.fromkeys(("pending", "leased", "generated", "verified"), 0)
        for items in self._steps.values():
            for item in items:
                counts[item.state] += 1
        extra = {"expired": self.expired, "rejected": self.rejected}
        return {**counts, "consumed_steps": self.consumed_steps, **extra}

    def _open(self, step: int) -> list[WorkItem]:
        if step < self.consumed_steps:
            raise LedgerError(f"step {step} was already consumed (next is {self.consumed_steps})")
        return self._steps.setdefault(step, [WorkItem(step, i) for i in range(self._per_step)])

    def _current(self, lease: int) -> WorkItem | None:
        item = self._by_lease.get(lease)
        if item is None:
            self.rejected += 1
        return item

    def _revoke(self, void: Callable[[WorkItem], bool]) -> list[WorkItem]:
        revoked: list[WorkItem] = []
        for item in list(self._by_lease.values()):
            if void(item):
                revoked.append(dataclasses.replace(item))
                self._free(item)
                self.expired += 1
        return revoked

    def _free(self, item: WorkItem) -> None:
        del self._by_lease[item.lease]
        item.state, item.lease, item.worker, item.groups = "pending", -1, "", ()


def _standing(item: WorkItem, now: float | None) -> str:
    """Describe the state of a work item that is not verified."""
    if item.state == "pending":
        return f"work item {item.index} (not leased)"
    since = "" if now is None else f", {now - item.leased_at:.0f} s since the lease"
    return f"work item {item.index} ({item.state} by {item.worker}{since})"
