"""The controller: decides which prompts each update uses and which worker generates them, each exactly once.

Which prompts, the plan says (`Plan`): a function of the config, the step, and if asked for of earlier results. So the
state of the controller is little more than a step number, and after any failure the same prompts are generated again,
with the same sampling keys and the same version.
"""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, cast

from axlearn_like.config import Configurable
from axlearn_like.run.clock import REAL, condition_of
from axlearn_like.run.events import EventLog
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh import UserError
from rl.controller.audits import Audits
from rl.controller.config import ControllerConfig
from rl.controller.evaluations import EvaluationSchedule
from rl.controller.heartbeats import Heartbeats
from rl.controller.leasing import LEASES_PER_POLICY, Leasing
from rl.controller.ledger import Ledger, WorkItem
from rl.controller.plan import Plan
from rl.controller.submissions import Submissions
from rl.protocol.headers import GroupHeader, header_of
from rl.protocol.messages import Group, Lease, Prompt, Rollout, RolloutData, contents_of
from rl.protocol.timeouts import Waits
from rl.tasks.skipped import SkippedProblems

BatchObserver = Callable[[int, Sequence[Group]], None]
PROMPTS_WAIT = 30.0  # seconds in one call: less than the time after which a role counts as unresponsive


class Controller(Configurable):
    """Leases of prompts to workers, and whole batches of scored groups for the trainer. All methods are thread-safe.

    A step may be leased once version `step - staleness` is published: then no token in its batch can be older than the
    bound. With `weights="pinned"` exactly that version generates it, which makes asynchronous runs repeatable; with
    "newest" the newest version at the time of the lease; with "in_flight" the worker also loads newer versions while
    it generates, so that a rollout may have tokens of several versions (each recorded, none older than the bound).

    Evaluations are leases too (`EvaluationSchedule`), of exactly the version that they evaluate.

    >>> from axlearn_like.tokenizers.bytes import ByteTokenizer
    >>> from rl.controller.controller import Controller
    >>> from rl.tasks.family import TaskFamily
    >>> from rl.tasks.mixture import TaskMixture
    >>> tasks = TaskMixture.Config(families=(TaskFamily.Config(name="chain_sum"),), seed=0)
    >>> sizes = {"num_steps": 3, "prompts_per_step": 4, "samples_per_prompt": 2, "groups_per_lease": 2}
    >>> controller = Controller.Config(tasks=tasks, tokenizer=ByteTokenizer.Config(), **sizes).build()
    >>> controller.begin(0, first_version=0)
    >>> controller.join("worker-0")
    >>> lease = controller.lease("worker-0", timeout=30)
    >>> lease.step, lease.version, len(lease.prompts)
    (0, 0, 2)
    >>> controller.stop()
    """

    class Config(ControllerConfig["Controller"]):
        pass

    def __init__(
        self,
        cfg: Config,
        *,
        events: EventLog | None = None,
        clock: Callable[[], float] = REAL,
        first_lease: int = 0,
        evaluations: EvaluationSchedule | None = None,
        skipped: SkippedProblems | None = None,
        observers: Sequence[BatchObserver] = (),
        audits: Audits | None = None,
    ):
        """Build the tasks, and await `begin`.

        Args:
            first_lease: larger than any lease id that a former controller of this run can have granted.
            evaluations: None: there are none.
            skipped: record of the problems that are left out; None: of this controller alone.
            observers: called with the number of each update, from 1, and its groups, when the trainer gets them: later
                this controller may be dead, and another one does not have them.
            audits: rollouts that are drawn again; None: there are none.
        """
        self.cfg = cfg
        tokenizer = cast(Tokenizer, cfg.tokenizer.build())
        self._plan = Plan(cfg, tokenizer, skipped, None if evaluations is None else evaluations.prepare)
        self._ledger = Ledger(cfg.prompts_per_step // cfg.groups_per_lease, next_lease=first_lease)
        self.number = first_lease // LEASES_PER_POLICY  # number of its policy among several
        restarted = first_lease % LEASES_PER_POLICY > 0
        self._audits, self._taken = audits or Audits.off(), -1  # the last step that the trainer has got
        self._leasing = Leasing(cfg, self._plan, self._ledger, evaluations, self._audits, restarted=restarted)
        parts = self._plan, self._ledger, self._leasing, evaluations, self._audits
        self._submissions = Submissions(*parts, self._quarantine)
        self._stopped = False
        self._headers: tuple[int, list[GroupHeader]] | None = None  # headers of the last requested step
        self._events = events or EventLog(os.devnull, silent=True)
        self._clock, self._evaluations, self._observers = clock, evaluations, observers
        self._changed = condition_of(clock)
        self.on_change: Callable[[], None] = lambda: None  # called under the lock when there may be new work
        self._workers: set[str] = set()  # joined and not left
        self._releases = Counter[str]()  # number by worker; a call from before one is of a process that is gone
        self._waits = Waits(cfg.timeouts.warn_after, clock)
        self._heartbeats = Heartbeats(cfg.timeouts.silent, clock, events)

    # ---- workers

    def join(self, worker: str) -> None:
        """Register a worker that starts or restarts; the leases of its former incarnation are released."""
        self.release(worker, "worker restarted")
        with self._changed:
            self._workers.add(worker)

    def heard(self, worker: str) -> None:
        """Record a heartbeat of a worker that has not left; never waits for the lock."""
        if worker in self._workers:
            self._heartbeats.heard(worker)

    def leave(self, worker: str, reason: str = "worker left") -> None:
        """Unregister a worker that shuts down, or is lost; its leases are released."""
        self.release(worker, reason)
        with self._changed:
            self._workers.discard(worker)
            self._heartbeats.forget(worker)
            self._waits.end(worker)

    def offers(self, worker: str) -> Literal["now", "soon"] | None:
        """Return if `lease` would grant work now, or once its prompts are made; None: there is no work."""
        with self._changed:
            self._look_after(worker)
            if not self._stopped and self._audits.offers(worker):
                return "now"
            key = None if self._stopped else self._leasing.next_key(worker, len(self._workers))
            return None if key is None else "now" if self._plan.made.ready(key) else "soon"

    def lease(self, worker: str, timeout: float = 0.0, patience: float | None = None) -> Lease | None:
        """Grant the next work item; None if there is none within `timeout` seconds, or the run is over.

        Where there is one, its prompts are awaited for longer (`patience` seconds, or a while), not under the lock. A
        call that waits while its worker is released, or joins again, gets None: nobody may hear the answer.
        """
        end, releases = self._clock() + timeout, self._releases[worker]
        give_up = self._clock() + max(timeout, PROMPTS_WAIT if patience is None else patience)
        while not self._stopped:
            with self._changed:
                if self._releases[worker] != releases:
                    return None
                self._look_after(worker)
                if isinstance(found := self._leasing.next_lease(worker, len(self._workers), self._clock()), Lease):
                    self._waits.end(worker)
                    return found
                if found is None:
                    self._wait(worker, worker, lambda: self._leasing.next_work(worker))
                    if (left := end - self._clock()) <= 0:
                        return None
                    self._changed.wait(min(left, self._until_expiry()))
            if found is not None:
                self._plan.made.get(found, lambda: self._stopped or self._clock() > give_up)
                if not self._plan.made.ready(found) and self._clock() > give_up:
                    with self._changed:
                        self._wait(worker, worker, lambda key=found: f"prompts of work item {key[1]} of step {key[0]}")
                    return None
        return None

    def renew(self, lease: int) -> bool:
        """Extend a lease whose worker is alive; False if the lease is void and the worker can drop the work."""
        with self._changed:
            self._expire()
            return self._submissions.ledger_of(lease).renew(lease, self._clock() + self.cfg.lease_seconds)

    def hand_back(self, lease: int, rollouts: tuple[Rollout, ...]) -> bool:
        """Store partial rollouts for the next worker, with audits none: one draws all; False: the lease is void."""
        with self._changed:
            ledger = self._submissions.ledger_of(lease)
            item = ledger.hand_back(lease, () if self._audits.on else rollouts)
            if item is not None and ledger is self._ledger:
                self._log("handed_back", item, tokens=sum(len(rollout.tokens) for rollout in rollouts))
            self._notify()
            return item is not None

    def generated(self, lease: int) -> bool:
        """Record that the tokens of a lease exist; False if the lease is void and the worker can drop the work."""
        with self._changed:
            ledger = self._submissions.ledger_of(lease)
            ledger.renew(lease, self._clock() + self.cfg.lease_seconds)
            return ledger.generated(lease)

    def submit(self, lease: int, groups: tuple[Group, ...]) -> bool:
        """Accept the scored groups of a lease; False, and nothing is kept, if the lease is void."""
        votes = self._submissions.votes(lease, groups)
        with self._changed:
            accepted, may_end_a_wait = self._submissions.submit(lease, groups, votes)
            if may_end_a_wait:
                self._notify()
            return accepted

    def _quarantine(self, worker: str, why: str) -> None:
        """Take everything from a worker that the trainer has not got: leases, and rollouts of updates to come."""
        self._audits.quarantine(worker)
        dropped = self._ledger.discard(worker, self._taken + 1)
        self.leave(worker, "worker in quarantine")
        self._events.append("controller", "quarantined", worker=worker, why=why, dropped=dropped)

    def release(self, worker: str, reason: str) -> int:
        """Release all leases of a worker that is gone; returns how many there were."""
        with self._changed:
            self._releases[worker] += 1
            released = self._ledger.release(worker)
            if self._evaluations is not None:
                released += self._evaluations.revoke(worker=worker)
            self._audits.revoke(worker=worker)
            self._log_expired(released, reason)
            self._notify()
            return len(released)

    # ---- trainer

    def begin(
        self, step: int, first_version: int, held: int | None = None, pool: Mapping[str, Any] | None = None
    ) -> None:
        """Start or resume at update `step`; versions `first_version` to `step`, and `held`, can be pulled.

        `pool`: the state that `plan_after` returned for the step before.
        """
        with self._changed:
            self._plan.begin(step, pool)
            self._leasing.begin(step, first_version, held)
            self._headers, self._taken = None, step - 1
            self._audits.clear()
            self._waits.clear()
            self._look_ahead()
            self._notify()

    def next_batch(self, step: int, timeout: float = 0.0) -> list[Group] | None:
        """Return a step's groups in the plan's order; None: not in time (UserError: `timeouts.batch` is over, too)."""
        end = self._clock() + timeout
        with self._changed:
            while (held := self._submissions.held_up(step, self._clock())) is not None:
                self._expire()
                self._wait("trainer", step, lambda held=held: f"batch {step}: {held}")
                if (left := end - self._clock()) <= 0 or self._stopped:
                    return None
                self._changed.wait(min(left, 1.0))
            self._waits.end(step)
            batch = self._plan.batch(self._ledger.batch(step))
            if step != self._taken:
                self._taken = step
                for observe in self._observers:
                    observe(step + 1, batch)
            return batch

    def headers(self, step: int, timeout: float = 0.0) -> list[GroupHeader] | None:
        """Return the headers of `next_batch`: what the trainer's processes need before each asks for `contents`."""
        if (groups := self.next_batch(step, timeout)) is None:
            return None
        with self._changed:
            if self._headers is None or self._headers[0] != step:
                self._headers = (step, [header_of(group) for group in groups])
            return self._headers[1]

    def contents(self, step: int, wanted: Mapping[int, tuple[int, ...]]) -> RolloutData | None:
        """Return these rollouts (group -> its rollouts) of a batch with their prompts; None if it is not complete."""
        with self._changed:
            if not self._ledger.complete(step):
                return None
            return contents_of(self._plan.batch(self._ledger.batch(step)), wanted)

    def plan_after(self, step: int) -> dict[str, Any] | None:
        """Return the prompt "pool"'s state after this step, and "figures" of the plan; None: it is not complete.

        {}: the plan depends on no results.
        """
        with self._changed:
            if not self._plan.depends_on_results:
                return {}
            return self._plan.after(self._ledger.batch(step)) if self._ledger.complete(step) else None

    def consumed(self, step: int) -> dict[str, float]:
        """Record that the update of this step is done; its rollouts can never be used again.

        Returns:
            Figures for the metrics: how many problems were left out so far, by reason, if some were; and with audits
            how many rollouts were audited since the update before, and how many of them were wrong.
        """
        with self._changed:
            if not self._leasing.begun:
                return {}  # restarted controller learns the step from `begin`
            self._plan.consume(self._ledger.batch(step))
            leases = self._ledger.consume(step)
            cpu = round(self._events.clock.cpu(), 4)  # seconds of this process so far
            self._events.append("controller", "consumed", step=step, leases=leases, cpu=cpu)
            self._look_ahead()
            return {**self._plan.maker.skipped.figures(), **self._audits.figures()}

    def finish(self, step: int) -> None:
        """End the run with version `step`, before the last update of its plan: its evaluation is all that is left."""
        with self._changed:
            if self._leasing.begun:
                self._leasing.finish(step)
            self._notify()

    def published(self, version: int) -> None:
        """Record that a version can be pulled."""
        with self._changed:
            if self._leasing.begun:
                self._leasing.published(version)
                self._look_ahead()
            self._notify()

    def evaluation(self, version: int) -> dict[str, float] | None:
        """Return what the evaluation of a version has measured; None if it is not complete."""
        with self._changed:
            return None if self._evaluations is None else self._evaluations.result(version)

    # ---- everyone

    def missing(self, step: int) -> str:
        """Describe what a step still waits for."""
        with self._changed:
            return self._submissions.held_up(step, self._clock()) or "nothing"

    def status(self) -> dict[str, Any]:
        """Return the ledger's counts, workers, newest version, the one being evaluated, and if the run is over."""
        with self._changed:
            evaluating = None if self._evaluations is None else self._evaluations.version
            standing = {"version": self._leasing.version, "evaluating": evaluating, "stopped": self._stopped}
            skipped = {"skipped": self._plan.maker.skipped.counts()}
            return {**self._ledger.counts(), "workers": sorted(self._workers), **standing, **skipped}

    @property
    def version(self) -> int:
        """The newest version that can be pulled; -1: the trainer has not begun."""
        return self._leasing.version

    @property
    def incarnation(self) -> int:
        """See `Lease`."""
        return self._leasing.incarnation

    @property
    def stopped(self) -> bool:
        """True after `stop`."""
        return self._stopped

    def stop(self) -> None:
        """End every wait, and grant no more leases."""
        with self._changed:
            self._stopped = True
            self._notify()

    def prompts(self, step: int, item: int) -> tuple[Prompt, ...]:
        """Return the prompts of one work item of one step, by the plan."""
        return self._plan.prompts(step, item)

    def _look_after(self, worker: str) -> None:
        """Take back the leases whose time is over, and those of silent workers; `worker` asks for work."""
        self._expire()
        for lost in self._heartbeats.lost(worker):
            self.leave(lost, "worker silent")
        if worker not in self._audits.quarantined:
            self._workers.add(worker)  # lost workers that go on count, too

    def _notify(self) -> None:
        self._changed.notify_all()
        self.on_change()

    def _look_ahead(self) -> None:
        """Have the prompts made that will be leased next."""
        evaluates = self._evaluations is not None and self._evaluations.version is not None
        self._plan.look_ahead(self._ledger.consumed_steps, self._leasing.steps.stop, evaluates)

    def _wait(self, who: str, name: Hashable, what: Callable[[], str]) -> None:
        """Record a wait, and log it when it is long (UserError: the trainer's, beyond `timeouts.batch`)."""
        seconds = self._waits.begin(name)
        if self._waits.due(name):
            self._events.append("controller", "waiting", who=who, what=what(), seconds=round(seconds, 1))
        if who == "trainer" and seconds > (limit := self.cfg.timeouts.batch):
            raise UserError(f"trainer has waited {seconds:.0f} s (timeouts.batch={limit:g}) for {what()}")

    def _until_expiry(self) -> float:
        """Return the seconds for which a wait for work need not look after leases and silent workers."""
        if self._heartbeats.watches or self._evaluations is not None or self._audits.on:
            return 1.0
        return self._ledger.next_deadline() - self._clock()

    def _expire(self) -> None:
        self._heartbeats.report()
        expired = self._ledger.expire(self._clock())
        if self._evaluations is not None:
            expired += self._evaluations.revoke(now=self._clock())
        self._audits.revoke(now=self._clock())
        self._log_expired(expired, "expired")

    def _log_expired(self, items: list[WorkItem], reason: str) -> None:
        for item in items:
            self._log("lease_expired", item, reason=reason)

    def _log(self, event: str, item: WorkItem, **fields: Any) -> None:
        """Log what happened to the lease of a work item."""
        lease = {"lease": item.lease, "step": item.step, "worker": item.worker}
        self._events.append("controller", event, **lease, **fields)
