"""Leasing: which steps may be leased now, what a worker gets next, and the versions that draw it."""

import dataclasses
import secrets
from typing import Any

import numpy as np

from rl.controller.audits import Audits
from rl.controller.config import ControllerConfig
from rl.controller.evaluations import EvaluationSchedule
from rl.controller.ledger import Ledger, WorkItem
from rl.controller.memory import EarlierTokens, RolloutMemory
from rl.controller.plan import EVALUATION, Key, Plan
from rl.protocol.messages import Lease, Prompt, Rollout

LEASES_PER_POLICY = 10**15  # lease ids of each of several policies, so that an id says whose it is


class Leasing:
    """Grants the work items of updates and of evaluations. Its methods are called under the controller's lock.

    A step may be leased once version `step - staleness` is published: then no token in its batch can be older than the
    bound.

    Attributes:
        memory: rollouts of updates, drafts of problems that are drawn again with the same noise.
    """

    def __init__(
        self,
        cfg: ControllerConfig[Any],
        plan: Plan,
        ledger: Ledger,
        evaluations: EvaluationSchedule | None,
        audits: Audits,
        *,
        restarted: bool,
    ):
        """Await `begin`; `evaluations`: None: there are none; `restarted`: a former controller may have leased."""
        self._cfg, self._plan, self._ledger, self._evaluations = cfg, plan, ledger, evaluations
        self._restarted, self._audits = restarted, audits
        self.version = self._first_version = -1
        self._last_step = cfg.num_steps  # updates after which the run ends
        self.incarnation = 0
        same_noise = cfg.pool is not None and cfg.pool.same_noise
        self.memory = RolloutMemory(cfg.pool.earlier_tokens if cfg.pool is not None and same_noise else 0)
        self._again = range(0)  # steps of which a former incarnation may have granted leases

    @property
    def begun(self) -> bool:
        """True once the trainer has said at which update it begins."""
        return self.version >= 0

    @property
    def steps(self) -> range:
        """Steps that may be leased now."""
        last = min(self._last_step - 1, self.version + self._cfg.staleness)
        return range(self._ledger.consumed_steps, (last if self.begun else -1) + 1)

    def begin(self, step: int, first_version: int, held: int | None) -> None:
        """Start or resume at update `step`; versions `first_version` to `step`, and `held`, can be pulled."""
        if self._restarted or self.begun:
            self._again = range(step, step + self._cfg.staleness + 1)
        self._ledger.skip_to(step)
        self.version, self._first_version = step, first_version
        self._last_step = self._cfg.num_steps
        self.incarnation = secrets.randbits(62)
        if self._evaluations is not None:
            self._evaluations.begin(step, self.incarnation, held)

    def published(self, version: int) -> None:
        """Record that a version can be pulled."""
        self.version = max(self.version, version)
        if self._evaluations is not None:
            self._evaluations.published(version)

    def finish(self, step: int) -> None:
        """End the run with version `step`: its evaluation is all that is left."""
        self._last_step = step
        if self._evaluations is not None:
            self._evaluations.finish(step)

    def next_lease(self, worker: str, workers: int, now: float) -> Lease | Key | None:
        """Grant the next work item of an evaluation, or else of an update; or say whose prompts are not made yet.

        Args:
            workers: how many there are, with this one.
        """
        if worker in self._audits.quarantined:
            return None
        again = self._audits.lease(worker, self._cfg.groups_per_lease, now, self._cfg.lease_seconds)
        if again is not None:
            return again
        if (lease := self._evaluation(worker, workers, now, idle=False)) is not None:
            return lease
        if self._evaluations is not None and self._evaluations.before_training:
            return None
        if (pending := self._ledger.pending(self.steps)) is None:
            return self._evaluation(worker, workers, now, idle=True)
        if not self._plan.made.ready(key := self._plan.key(pending.step, pending.index)):
            return key
        # Before the lease: what raises here leaves nothing leased.
        prompts = self._plan.prompts(pending.step, pending.index)
        self._ledger.lease(worker, self.steps, now, self._cfg.lease_seconds)
        if self._evaluations is not None:
            self._evaluations.trains(worker)
        return self._of_update(pending, prompts)

    def next_key(self, worker: str, workers: int) -> Key | None:
        """Return whose prompts `next_lease`, audits aside, would grant or wait for; None: there is no work."""
        if worker in self._audits.quarantined:
            return None
        pending = self._ledger.pending(self.steps)
        if (evaluations := self._evaluations) is not None:
            if evaluations.pending and evaluations.takes(worker, workers, idle=pending is None):
                return EVALUATION
            if evaluations.before_training:
                return None
        return None if pending is None else self._plan.key(pending.step, pending.index)

    def next_work(self, worker: str) -> str:
        """Describe what a worker without a lease waits for."""
        if worker in self._audits.quarantined:
            return "the end of the run: it is in quarantine (event `quarantined`)"
        if not self.begun:
            return "the trainer to begin"
        if self._evaluations is not None and self._evaluations.before_training:
            return "the evaluation of version 0, which others have leased"
        version = self.steps.stop - self._cfg.staleness
        return f"a lease: all of version {self.version} are granted, the next come with version {max(0, version)}"

    def _evaluation(self, worker: str, workers: int, now: float, *, idle: bool) -> Lease | Key | None:
        """Grant the next work item of an evaluation, if this worker is to evaluate now."""
        evaluations = self._evaluations
        if evaluations is None or not evaluations.takes(worker, workers, idle=idle):
            return None
        if not self._plan.made.ready(EVALUATION):
            return EVALUATION
        self._plan.made.get(EVALUATION)  # raises what went wrong
        if (granted := evaluations.lease(worker, now, self._cfg.lease_seconds)) is None:
            return None
        item, lease = granted
        partial = tuple(r for p in lease.prompts for r in self._usable(item.partial, p, *[lease.version] * 2))
        return dataclasses.replace(lease, partial=partial)

    def granted(self, item: WorkItem) -> Lease:
        """Return the lease of a work item in a worker's hands, as it was granted."""
        return self._of_update(item, self._plan.prompts(item.step, item.index))

    def _of_update(self, item: WorkItem, prompts: tuple[Prompt, ...]) -> Lease:
        pinned = max(item.step - self._cfg.staleness, self._first_version)
        version = pinned if self._cfg.weights == "pinned" else self.version
        oldest = version if self._cfg.weights == "pinned" else item.step - self._cfg.staleness
        return Lease(
            id=item.lease,
            step=item.step,
            prompts=prompts,
            samples=self._cfg.samples_per_prompt,
            version=version,
            seconds=self._cfg.lease_seconds,
            follow=self._cfg.weights == "in_flight",
            partial=tuple(r for p in prompts for r in self._usable(item.partial, p, oldest, version)),
            incarnation=self.incarnation,
            rerun=item.attempts > 1 or item.step in self._again,
            earlier=_tokens_of(item.partial, prompts) or self.memory.of(prompts),
        )

    def _usable(self, partial: tuple[Rollout, ...], prompt: Prompt, oldest: int, newest: int) -> list[Rollout]:
        """Return the partial rollouts of a prompt if all samples are there and no token is too old or too new."""
        found = [rollout for rollout in partial if rollout.prompt_id == prompt.id]
        whole = sorted(rollout.sample_id for rollout in found) == list(range(self._cfg.samples_per_prompt))
        within = all(np.all((r.versions >= oldest) & (r.versions <= newest)) for r in found)
        return found if whole and within else []


def _tokens_of(partial: tuple[Rollout, ...], prompts: tuple[Prompt, ...]) -> EarlierTokens:
    """Return the tokens of rollouts that were handed back, also of those too old to be continued: drafts."""
    if not partial:
        return ()
    ordered = sorted(partial, key=lambda rollout: rollout.sample_id)
    return tuple(tuple(one.tokens for one in ordered if one.prompt_id == prompt.id) for prompt in prompts)
