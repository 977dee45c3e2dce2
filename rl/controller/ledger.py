"""The ledger: where every prompt of every step stands, so that each is consumed exactly once.

    pending --lease--> leased --generated--> generated --verified--> verified --consume--> consumed
       ^                  |                      |
       +---- expired, or its worker is gone -----+
       +---- handed back, with what it had ------+

The unit is a *parcel*: the prompts of one step that are leased together. A parcel that comes back is leased again
with a new lease id, and what is then still reported under the old id is turned away; since sampling keys depend only on
the request, the second generation is the same as the lost one.
"""

import dataclasses
from typing import Literal

from rl.messages import Group, Rollout

ParcelState = Literal["pending", "leased", "generated", "verified", "consumed"]


class LedgerError(RuntimeError):
    """A transition that would lose, halve or repeat work."""


@dataclasses.dataclass(slots=True)
class Parcel:
    """One leasable piece of a step."""

    step: int
    index: int
    state: ParcelState = "pending"
    lease: int = -1
    worker: str = ""
    leased_at: float = 0.0
    deadline: float = 0.0
    groups: tuple[Group, ...] = ()
    partial: tuple[Rollout, ...] = ()  # handed back by one who had to go, for the next to go on from


class Ledger:
    """All parcels not yet consumed, and counts of what has happened. Times come from the caller's clock."""

    def __init__(self, parcels_per_step: int, next_lease: int = 0):
        self._per_step = parcels_per_step
        self._steps: dict[int, list[Parcel]] = {}
        self._by_lease: dict[int, Parcel] = {}
        self.next_lease = next_lease
        self.consumed_steps: int = 0
        self.expired = 0
        self.turned_away = 0

    def lease(self, worker: str, steps: range, now: float, seconds: float) -> Parcel | None:
        """Grant the first pending parcel of the earliest of these steps."""
        for step in steps:
            for parcel in self._open(step):
                if parcel.state == "pending":
                    parcel.state, parcel.worker = "leased", worker
                    parcel.lease, parcel.leased_at = self.next_lease, now
                    parcel.deadline = now + seconds
                    self._by_lease[self.next_lease] = parcel
                    self.next_lease += 1
                    return parcel
        return None

    def generated(self, lease: int) -> bool:
        """The worker has the tokens; False if the lease is no longer valid."""
        parcel = self._current(lease)
        if parcel is None:
            return False
        parcel.state = "generated"
        return True

    def renew(self, lease: int, deadline: float) -> bool:
        """The worker is alive and at it; False if the lease is no longer valid."""
        parcel = self._by_lease.get(lease)
        if parcel is None:
            return False
        parcel.deadline = max(parcel.deadline, deadline)
        return True

    def hand_back(self, lease: int, partial: tuple[Rollout, ...]) -> Parcel | None:
        """The worker has to go; what it has is kept for the next. A copy as it was, or None if the lease is void."""
        if (parcel := self._current(lease)) is None:
            return None
        before = dataclasses.replace(parcel)
        parcel.partial = partial
        self._free(parcel)
        return before

    def verified(self, lease: int, groups: tuple[Group, ...]) -> bool:
        """The scored groups of a lease; False (and nothing kept) if the lease is no longer valid."""
        parcel = self._current(lease)
        if parcel is None:
            return False
        parcel.state, parcel.groups, parcel.partial = "verified", groups, ()
        del self._by_lease[lease]
        return True

    def complete(self, step: int) -> bool:
        """Whether every parcel of the step is verified."""
        return all(parcel.state == "verified" for parcel in self._open(step))

    def batch(self, step: int) -> list[Group]:
        """The groups of a complete step, in order of the plan whatever the order of arrival."""
        if not self.complete(step):
            raise LedgerError(f"step {step} is not complete: {self.missing(step)}")
        return [group for parcel in self._open(step) for group in parcel.groups]

    def consume(self, step: int) -> list[int]:
        """The update of this step is done. Steps are consumed in order, whole, and once. Returns the leases it had."""
        if step != self.consumed_steps:
            raise LedgerError(
                f"step {step} cannot be consumed: steps are consumed once and in order, "
                f"and the next is {self.consumed_steps}"
            )
        self.batch(step)
        parcels = self._steps.pop(step)
        for parcel in parcels:
            parcel.state = "consumed"
        self.consumed_steps += 1
        return [parcel.lease for parcel in parcels]

    def skip_to(self, step: int) -> None:
        """Start (or resume) with this step; everything unconsumed is forgotten and will be generated again."""
        self._steps.clear()
        self._by_lease.clear()
        self.consumed_steps = step

    def expire(self, now: float) -> list[Parcel]:
        """Take back the leases whose time is over; returns copies as they were."""
        return self._take_back(lambda parcel: parcel.deadline <= now)

    def release(self, worker: str) -> list[Parcel]:
        """Take back all leases of a worker that is gone; returns copies as they were."""
        return self._take_back(lambda parcel: parcel.worker == worker)

    def missing(self, step: int, now: float | None = None) -> str:
        """What a step still waits for, in words; given the time, also for how long."""
        waiting = [_standing(parcel, now) for parcel in self._open(step) if parcel.state != "verified"]
        return ", ".join(waiting) or "nothing"

    def counts(self) -> dict[str, int]:
        """Open parcels by state, steps consumed, leases expired, reports turned away."""
        counts: dict[str, int] = dict.fromkeys(("pending", "leased", "generated", "verified"), 0)
        for parcels in self._steps.values():
            for parcel in parcels:
                counts[parcel.state] += 1
        extra = {"expired": self.expired, "turned_away": self.turned_away}
        return {**counts, "consumed_steps": self.consumed_steps, **extra}

    def _open(self, step: int) -> list[Parcel]:
        if step < self.consumed_steps:
            raise LedgerError(f"step {step} was already consumed (next is {self.consumed_steps})")
        return self._steps.setdefault(step, [Parcel(step, i) for i in range(self._per_step)])

    def _current(self, lease: int) -> Parcel | None:
        parcel = self._by_lease.get(lease)
        if parcel is None:
            self.turned_away += 1
        return parcel

    def _take_back(self, gone) -> list[Parcel]:
        taken = []
        for parcel in list(self._by_lease.values()):
            if gone(parcel):
                taken.append(dataclasses.replace(parcel))
                self._free(parcel)
                self.expired += 1
        return taken

    def _free(self, parcel: Parcel) -> None:
        del self._by_lease[parcel.lease]
        parcel.state, parcel.lease, parcel.worker, parcel.groups = "pending", -1, "", ()


def _standing(parcel: Parcel, now: float | None) -> str:
    """Of a parcel that is not verified."""
    if parcel.state == "pending":
        return f"parcel {parcel.index} (not leased)"
    since = "" if now is None else f", {now - parcel.leased_at:.0f} s since the lease"
    return f"parcel {parcel.index} ({parcel.state} by {parcel.worker}{since})"
