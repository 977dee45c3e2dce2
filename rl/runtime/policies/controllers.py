"""The controllers of several policies behind one interface: workers lease from all, by fair shares of tokens."""

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.controller.controller import PROMPTS_WAIT, Controller
from rl.controller.fair_share import FairShare
from rl.controller.leasing import LEASES_PER_POLICY
from rl.protocol.messages import Group, Lease, Rollout, Seat
from rl.protocol.players import Player, played_together, seats_of
from rl.protocol.timeouts import Waits
from rl.runtime.policies.changes import TakenChanges
from rl.runtime.policies.runs import role_of

_SLICE = 1.0  # seconds of a wait, after which leases may have expired
_PROMPTS_SLICE = 0.2  # seconds for which the prompts of one policy are awaited, before others are asked again

Make = Callable[[str, Collection[int]], Controller]  # maker for a policy, given the numbers of the others


class Controllers:
    """A controller for each policy, asked as one by workers. All methods are thread-safe.

    What a policy gets is what its own controller grants, in its order: shares decide only whose work is next. The id of
    a lease says whose it is: the controller of policy number n grants ids from n * LEASES_PER_POLICY. A policy that
    fails or is stopped gets nothing more, and the others go on.
    """

    def __init__(
        self,
        controllers: Mapping[str, Controller],
        share: FairShare,
        events: EventLog | None = None,
        failed: Mapping[str, str] | None = None,
        players: Mapping[str, Mapping[str, Player]] | None = None,
        *,
        make: Make | None = None,
        taken: TakenChanges | None = None,
    ):
        """Put controllers together.

        Args:
            controllers: by policy (`RLExperiment.make_controller`).
            share: shares of the policies.
            events: events of the fleet.
            failed: policies that have failed before, and why (`failures`).
            players: players of the roles of each policy's episodes; None: there are no roles.
            make: makes the controller of a policy that joins or resumes; None: none does.
            taken: changes of policies that were taken up before; None: none were.
        """
        self._make, self._taken = make, taken or TakenChanges()
        self._admitting = threading.Lock()
        self._players = {name: found for name, found in (players or {}).items() if found}
        self._together = played_together(self._players)
        self._granting = threading.Lock()  # leases of the same episodes are granted to one worker
        self._controllers, self._share, self._events = dict(controllers), share, events
        self._names = {each.number: name for name, each in self._controllers.items()}
        self._changed = threading.Condition()
        self._changes = 0
        self._failed: dict[str, str] = {}
        first = next(iter(self._controllers.values()))
        self._waits = Waits(first.cfg.timeouts.warn_after)
        for name, controller in self._controllers.items():
            controller.on_change = self._wake
            if name in (failed or {}):
                self._failed[name] = (failed or {})[name]
            if name in self._failed or self._taken.is_stopped(name):
                controller.stop()

    def of(self, policy: str) -> Controller:
        """Return the controller of a policy, for its trainer (UserError: there is no such policy)."""
        return role_of(self._controllers, policy)

    # ---- workers

    def join(self, worker: str) -> None:
        """Register a worker that starts or restarts; the leases of its former incarnation are released."""
        for controller in self._controllers.values():
            controller.join(worker)

    def heard(self, worker: str) -> None:
        """Record a heartbeat of a worker that has not left; never waits for a lock."""
        for controller in self._controllers.values():
            controller.heard(worker)

    def leave(self, worker: str, reason: str = "worker left") -> None:
        """Unregister a worker that shuts down, or is lost; its leases are released."""
        for controller in self._controllers.values():
            controller.leave(worker, reason)
        with self._changed:
            self._waits.end(worker)

    def release(self, worker: str, reason: str) -> int:
        """Release all leases of a worker that is gone; returns how many there were."""
        return sum(controller.release(worker, reason) for controller in self._controllers.values())

    def lease(self, worker: str, timeout: float = 0.0) -> Lease | None:
        """Grant the next work item of the policy whose turn it is; None if there is none within `timeout` seconds.

        Where there is none but of policies whose prompts are being made, or whose quotas are used up, those are awaited
        beyond the timeout; but for a negative one, of a worker that has other work.
        """
        end = time.monotonic() + timeout
        give_up = end if timeout < 0 else time.monotonic() + max(timeout, PROMPTS_WAIT)
        while not self._stopped:
            with self._changed:
                seen = self._changes
            offered = {name: self._controllers[name].offers(worker) for name in self._going() if self._may(name)}
            ready = [name for name, when in offered.items() if when == "now"]
            if not ready and time.monotonic() < give_up:
                ready = [name for name, when in offered.items() if when == "soon"]
            if ready and not (ready := self._share.within(ready)) and time.monotonic() < give_up:
                self._pause(seen)
            elif ready:
                if (lease := self._granted_together(self._share.choose(ready), worker)) is not None:
                    return lease
            elif timeout < 0 or not self._wait(worker, end, seen):
                return None
        return None

    def renew(self, lease: int) -> bool:
        """Extend a lease whose worker is alive; False if the lease is void and the worker can drop the work."""
        return self._answer(lease, lambda controller: controller.renew(lease))

    def hand_back(self, lease: int, rollouts: tuple[Rollout, ...]) -> bool:
        """Store the partial rollouts of a worker that shuts down, for the next worker; False if the lease is void."""
        if (name := self._name_of(lease)) is not None:
            self._share.charge(name, 0)  # submission pays for them
        return self._answer(lease, lambda controller: controller.hand_back(lease, rollouts))

    def generated(self, lease: int) -> bool:
        """Record that the tokens of a lease exist; False if the lease is void and the worker can drop the work."""
        return self._answer(lease, lambda controller: controller.generated(lease))

    def submit(self, lease: int, groups: tuple[Group, ...]) -> bool:
        """Accept the scored groups of a lease, and charge its policy; False, and nothing is kept, if it is void."""
        if (name := self._name_of(lease)) is not None:
            drawn = (r for group in groups for r in group.rollouts if not r.demonstration)
            self._share.charge(name, sum(len(rollout.tokens) for rollout in drawn))
        return self._answer(lease, lambda controller: controller.submit(lease, groups))

    # ---- everyone

    def status(self) -> dict[str, Any]:
        """Return `Controller.status` by policy in "policies", sums of counts, who failed, and if all have stopped."""
        found = {name: controller.status() for name, controller in self._controllers.items()}
        first = next(iter(found.values()))
        counts = [name for name, value in first.items() if type(value) is int and name not in ("version", "evaluating")]
        return {
            **{name: sum(status[name] for status in found.values()) for name in counts},
            "workers": sorted({worker for status in found.values() for worker in status["workers"]}),
            "stopped": all(status["stopped"] for status in found.values()),
            "failed": self.failed(),
            "policies": found,
        }

    def fail(self, policy: str, why: str, step: int | None = None) -> None:
        """Stop a policy at fault; its leases are void, others go on. `step`: updates, if its trainer found it."""
        controller = self.of(policy)
        if not self._has_failed(policy, why, step):
            return
        controller.stop()
        for other in self._together.get(policy, ()):
            self.fail(other, f"policy {policy!r}, which plays in its episodes, has failed: {why}")

    def failed(self) -> dict[str, str]:
        """Return the policies that have failed, and why."""
        with self._changed:
            return dict(self._failed)

    def admit(self, policy: str, change: int) -> None:
        """Begin a policy that joins or resumes by this change, once; one without a controller has failed."""
        with self._admitting:
            if self._make is None or not self._taken.is_new(policy, change):
                return
            others = [each.number for name, each in self._controllers.items() if name != policy]
            self._taken.admitted(policy, change)
            self._share.forget(policy)
            with self._changed:
                self._failed.pop(policy, None)
            try:
                controller = self._make(policy, others)
            except UserError as error:
                self._has_failed(policy, str(error))
                return
            for worker in self.status()["workers"]:
                controller.join(worker)
            controller.on_change = self._wake
            with self._changed:  # replaced as wholes: other threads go through them
                self._names = {**self._names, controller.number: policy}
                self._controllers = {**self._controllers, policy: controller}
        self._wake()

    def dismiss(self, policy: str, change: int) -> None:
        """Stop a policy by this change of the run, until it is admitted again; its leases are void."""
        with self._admitting:
            if self._taken.is_new(policy, change):
                self._taken.stopped(policy, change)
                self.of(policy).stop()

    def stop(self) -> None:
        """End every wait, and grant no more leases."""
        for controller in self._controllers.values():
            controller.stop()

    # ---- parts of a call

    @property
    def _stopped(self) -> bool:
        return all(controller.stopped for controller in self._controllers.values())

    def _going(self) -> list[str]:
        return [name for name, controller in self._controllers.items() if not controller.stopped]

    def _has_failed(self, policy: str, why: str, step: int | None = None) -> bool:
        """Record that a policy has failed; False: it had before."""
        with self._changed:
            if policy in self._failed:
                return False
            self._failed[policy] = why
        if self._events is not None:
            self._events.append("controller", "policy_failed", policy=policy, why=why, step=step)
        return True

    def _name_of(self, lease: int) -> str | None:
        """Return whose a lease is; None: nobody's, or of a policy that has failed or was stopped."""
        name = self._names.get(lease // LEASES_PER_POLICY)
        return None if name is None or name in self.failed() or self._taken.is_stopped(name) else name

    def _answer(self, lease: int, ask: Callable[[Controller], bool]) -> bool:
        """Ask the controller of a lease; the policy fails where the answer is an error of its own."""
        if (name := self._name_of(lease)) is None:
            return False
        try:
            return ask(self._controllers[name])
        except UserError as error:
            self.fail(name, str(error))
            return False

    def _granted(self, name: str, worker: str) -> Lease | None:
        """Lease of the policy that was chosen; None if another worker was faster, or its prompts are not made yet."""
        try:
            lease = self._controllers[name].lease(worker, patience=_PROMPTS_SLICE)
        except UserError as error:  # a problem that cannot be made
            self.fail(name, str(error))
            lease = None
        if lease is None:
            self._share.charge(name, 0)
            return None
        with self._changed:
            self._waits.end(worker)
        return self._seated(name, lease)

    def _seated(self, name: str, lease: Lease) -> Lease:
        """Return a lease with the name of its policy, and who draws each role of its episodes."""
        players = self._players.get(name, {})
        seats: tuple[Seat, ...] = ()
        if players:
            incarnations = {one.policy: self.of(one.policy).incarnation for one in players.values() if one.policy}
            seats = seats_of(players, lease, incarnations)
        return dataclasses.replace(lease, policy=name, seats=seats)

    def _granted_together(self, name: str, worker: str) -> Lease | None:
        """Lease of the policy that was chosen, with those of the policies that learn in the same episodes."""
        learning = [one.policy for one in self._players.get(name, {}).values() if one.learns and one.policy != name]
        if not learning:
            return self._granted(name, worker)
        with self._granting:
            if (lease := self._granted(name, worker)) is None:
                return None
            ready = [other for other in learning if self._may(other) and self._controllers[other].offers(worker)]
            beside = [found for other in ready if (found := self._granted(other, worker)) is not None]
            return dataclasses.replace(lease, beside=tuple(beside))

    def _may(self, name: str) -> bool:
        """Return True if those that play with it have its version: none gets ahead by more than it keeps."""
        version = self._controllers[name].version
        return all(self._controllers[other].version >= version for other in self._together.get(name, ()))

    def _wait(self, worker: str, end: float, seen: int) -> bool:
        """Wait for new work of any policy; False: the time is over."""
        with self._changed:
            seconds = self._waits.begin(worker)
            if self._waits.due(worker) and self._events is not None:
                what = f"a lease: those of all {len(self._controllers)} policies are granted, or done"
                self._events.append("controller", "waiting", who=worker, what=what, seconds=round(seconds, 1))
            if (left := end - time.monotonic()) <= 0:
                return False
            self._changed.wait_for(lambda: self._changes != seen, min(left, _SLICE))
            return True

    def _pause(self, seen: int) -> None:
        """Wait a moment for quotas."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, _PROMPTS_SLICE)

    def _wake(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()
