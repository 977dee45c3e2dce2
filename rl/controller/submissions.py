"""Submissions of rollouts: which of them count, what audits find in them, and what an update still waits for."""

from collections.abc import Callable, Mapping, Sequence

from rl.controller.audits import Audits
from rl.controller.evaluations import EvaluationSchedule
from rl.controller.leasing import Leasing
from rl.controller.ledger import Ledger
from rl.controller.plan import Plan
from rl.protocol.messages import Group

Votes = Mapping[int, tuple[str, ...]]


class Submissions:
    """Scored groups on their way into batches and evaluations. Called under the controller's lock, but for `votes`."""

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        leasing: Leasing,
        evaluations: EvaluationSchedule | None,
        audits: Audits,
        quarantine: Callable[[str, str], None],
    ):
        """Take the parts of the controller; `quarantine` drops what a worker has drawn, and is told why."""
        self._plan, self._ledger, self._leasing = plan, ledger, leasing
        self._evaluations, self._audits, self._quarantine = evaluations, audits, quarantine

    def ledger_of(self, lease: int) -> Ledger | Audits:
        """Return what keeps a lease: audits, the evaluation in hand, or the ledger of updates."""
        if self._audits.owns(lease):
            return self._audits
        found = None if self._evaluations is None else self._evaluations.ledger(lease)
        return found or self._ledger

    def votes(self, lease: int, groups: Sequence[Group]) -> Votes:
        """Return what the samples of an evaluation vote for, by problem; thread-safe, for it decodes all answers."""
        return evaluations.votes(groups) if (evaluations := self._evaluation_of(lease)) is not None else {}

    def submit(self, lease: int, groups: tuple[Group, ...], votes: Votes) -> tuple[bool, bool]:
        """Take a lease's scored groups, none if it is void; returns if they are accepted, and may end a wait."""
        if self._audits.owns(lease):
            audited = self._audited(lease, groups)
            return audited, audited
        if (evaluations := self._evaluation_of(lease)) is not None:
            return evaluations.verified(lease, groups, votes), True
        item = self._ledger.find(lease)
        if item is not None and self._audits.on:
            wrong = self._audits.choose(item.worker, self._leasing.granted(item), groups)
            if wrong is not None:
                self._quarantine(item.worker, wrong)
        accepted = self._ledger.verified(lease, groups)  # False for a wrong worker
        if accepted:
            self._leasing.memory.remember(groups)
        completed = accepted and item is not None and self._complete(item.step)
        return accepted, completed or self._audits.on

    def held_up(self, step: int, now: float) -> str | None:
        """Describe what an update still waits for; None if it can be made."""
        if not self._ledger.complete(step):
            return self._ledger.missing(step, now)
        if (held := self._audits.holds(step)) is not None:
            return held
        if self._evaluations is not None and self._evaluations.holds(step):
            return f"the evaluation of version {self._evaluations.version}, before the next version to evaluate is made"
        return None

    def _evaluation_of(self, lease: int) -> EvaluationSchedule | None:
        return self._evaluations if self._evaluations is not None and self._evaluations.owns(lease) else None

    def _complete(self, step: int) -> bool:
        """Return True if all of a step is verified and audited; then further work items may be due."""
        if not self._ledger.complete(step) or self._audits.holds(step):
            return False
        self._ledger.add(step, self._plan.replacements(self._ledger.batch(step)))
        return True

    def _audited(self, lease: int, groups: tuple[Group, ...]) -> bool:
        """Compare what was drawn again, and drop what wrong workers have drawn; False if the lease is void."""
        step = self._audits.step_of(lease)
        if (wrong := self._audits.submitted(lease, groups)) is None or step is None:
            return False
        for worker, why in wrong.items():
            self._quarantine(worker, why)
        self._complete(step)
        return True
