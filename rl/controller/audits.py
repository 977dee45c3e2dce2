"""Audits: a share of each worker's rollouts is drawn again by another worker, and compared.

A rollout follows from its prompt, its sample, the run's seed and a version's weights. So a worker with stale weights,
another seed, a cheaper model or a processor that errs has drawn another one, and of k wrong rollouts at least one is
found with probability 1 - (1 - share)**k. Which are audited follows from a secret and is decided when a worker has
submitted them. Where two drawings differ, a third decides.
"""

import dataclasses
import hashlib
import itertools
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Self

import numpy as np

from axlearn_like.run.events import EventLog
from rl.audit.comparison import AuditedDraw, AuditTerms, Difference, rollout_name
from rl.protocol.messages import Group, Lease, Prompt, Rollout

_MOST = 3  # drawings of a rollout, after which the audit gives up if no two are equal


@dataclasses.dataclass(slots=True, eq=False)
class _Case:
    """A rollout that is drawn again."""

    lease: Lease  # lease for which it was drawn first
    prompt: Prompt
    sample: int
    drawings: list[AuditedDraw]
    granted: int = -1  # lease under which it is drawn again now

    def wants(self, worker: str) -> bool:
        return self.granted < 0 and all(drawing.worker != worker for drawing in self.drawings)


@dataclasses.dataclass(slots=True)
class _Grant:
    worker: str
    cases: list[_Case]
    deadline: float


class Audits:
    """Rollouts that are drawn again, and the workers found to be wrong. Called under the controller's lock.

    Attributes:
        on: True if rollouts are drawn again; False: nothing is chosen, and all that is asked for is empty.
        quarantined: workers that get no more leases.
    """

    def __init__(
        self,
        share: float,
        terms: AuditTerms,
        *,
        first_lease: int,
        leases: int,
        events: EventLog | None = None,
        quarantined: Collection[str] = (),
    ):
        """Audit a share of each worker's rollouts, by `leases` ids from `first_lease`; `quarantined`: known wrong."""
        self._limit, self._terms, self._events = round(share * 2**64), terms, events
        self._ids, self._next = range(first_lease, first_lease + leases), first_lease
        self.on = share > 0
        self._salt = secrets.token_bytes(16)
        self.quarantined = set(quarantined)
        self._cases: list[_Case] = []
        self._grants: dict[int, _Grant] = {}
        self._audited, self._failures = 0, 0  # counts since the last call of `figures`

    @classmethod
    def off(cls) -> Self:
        """Return audits of nothing."""
        return cls(0.0, AuditTerms(seed=0, vocab=0, cpu_bound=0.0, bound=0.0), first_lease=0, leases=0)

    # ---- choice

    def choose(self, worker: str, lease: Lease, groups: Sequence[Group]) -> str | None:
        """Choose rollouts of a worker to be drawn again; returns what is wrong if they are not those of the lease."""
        if (wrong := _malformed(lease, groups)) is not None:
            self._failures += 1
            return wrong
        for group in groups:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                if self._is_chosen(lease, rollout):
                    drawing = AuditedDraw(worker, rollout, score, group.hardware)
                    self._cases.append(_Case(lease, group.prompt, rollout.sample_id, [drawing]))
        return None

    def _is_chosen(self, lease: Lease, rollout: Rollout) -> bool:
        name = f"{lease.id}/{rollout.prompt_id}/{rollout.sample_id}".encode()
        digest = hashlib.blake2b(name, key=self._salt, digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._limit

    def holds(self, step: int) -> str | None:
        """Return what an update waits for; None: all audits of its rollouts are done."""
        cases = [case for case in self._cases if case.lease.step == step]
        if not cases:
            return None
        names = sorted({drawing.worker for drawing in cases[0].drawings})
        who = f"another worker than {' and '.join(names)} to draw {rollout_name(cases[0].prompt, cases[0].sample)}"
        return f"{len(cases)} audits, such as {who}"

    # ---- leases of those that draw again

    def offers(self, worker: str) -> bool:
        """Return True if there is a rollout that this worker can draw again."""
        return worker not in self.quarantined and any(case.wants(worker) for case in self._cases)

    def lease(self, worker: str, prompts: int, now: float, seconds: float) -> Lease | None:
        """Grant rollouts of the earliest step that others have drawn, of so many prompts at most; None: no work."""
        if not self.offers(worker):
            return None
        wanted = [case for case in self._cases if case.wants(worker)]
        first = min(wanted, key=lambda case: case.lease.step).lease
        chosen: dict[int, list[_Case]] = {}
        for case in wanted:
            same = (case.lease.step, case.lease.incarnation) == (first.step, first.incarnation)
            mine = chosen.get(case.prompt.id) if same else None
            if mine is not None and mine[0].prompt.draw == case.prompt.draw:
                mine.append(case)
            elif same and mine is None and len(chosen) < prompts:
                chosen[case.prompt.id] = [case]
        number, self._next = self._next, self._next + 1
        cases = [case for mine in chosen.values() for case in mine]
        for case in cases:
            case.granted = number
        self._grants[number] = _Grant(worker, cases, now + seconds)
        again = {prompt: tuple(case.sample for case in mine) for prompt, mine in chosen.items()}
        asked = tuple(mine[0].prompt for mine in chosen.values())
        return dataclasses.replace(first, id=number, prompts=asked, partial=(), seconds=seconds, again=again)

    def owns(self, lease: int) -> bool:
        """Return True for a lease of an audit, in hand or not."""
        return lease in self._ids

    def step_of(self, lease: int) -> int | None:
        """Return the step whose rollouts a lease draws again; None if it is void."""
        grant = self._grants.get(lease)
        return None if grant is None or not grant.cases else grant.cases[0].lease.step

    def generated(self, lease: int) -> bool:
        """Return False if a lease is void."""
        return lease in self._grants

    def renew(self, lease: int, deadline: float) -> bool:
        """Extend the lease of a worker that is alive; False if it is void."""
        if (grant := self._grants.get(lease)) is not None:
            grant.deadline = max(grant.deadline, deadline)
        return grant is not None

    def hand_back(self, lease: int, partial: tuple[Rollout, ...]) -> None:
        """Free the rollouts of a lease; those of a worker that shuts down are not continued."""
        self._free([lease])

    def revoke(self, *, worker: str | None = None, now: float = -np.inf) -> None:
        """Free the rollouts of a worker that is gone, and those whose time is over."""
        self._free([one for one, g in self._grants.items() if g.worker == worker or g.deadline <= now])

    def _free(self, leases: Iterable[int]) -> None:
        for lease in list(leases):
            if (grant := self._grants.pop(lease, None)) is not None:
                for case in grant.cases:
                    case.granted = -1

    # ---- verdicts

    def submitted(self, lease: int, groups: Sequence[Group]) -> dict[str, str] | None:
        """Compare what a worker has drawn again; returns workers that are wrong, and why. None: the lease is void."""
        if (grant := self._grants.get(lease)) is None:
            return None
        found = {
            (group.prompt.id, rollout.sample_id): AuditedDraw(grant.worker, rollout, score, group.hardware)
            for group in groups
            for rollout, score in zip(group.rollouts, group.scores, strict=False)
        }
        self._free([lease])
        wrong: dict[str, str] = {}
        for case in grant.cases:
            if (drawing := found.get((case.prompt.id, case.sample))) is None:
                wrong[grant.worker] = f"did not draw {rollout_name(case.prompt, case.sample)} again"
                self._failures += 1
                continue
            case.drawings.append(drawing)
            wrong |= self._judge(case)
        return wrong

    def _judge(self, case: _Case) -> dict[str, str]:
        """Close a case of which two drawings are equal, or of which there were enough."""
        different = {
            (one.worker, other.worker): self._terms.difference(case.prompt, one, other)
            for one, other in itertools.combinations(case.drawings, 2)
        }
        equal = next((pair for pair, difference in different.items() if difference is None), None)
        wrong: dict[str, str] = {}
        if equal is not None or len(case.drawings) >= _MOST:
            self._cases.remove(case)
            self._audited += 1
        if equal is not None:
            for pair, difference in different.items():
                if difference is not None and equal[1] in pair:
                    (worker,) = {*pair} - {equal[1]}
                    wrong[worker] = f"{rollout_name(case.prompt, case.sample)}: {difference}"
                    self._log("audit_failed", case, difference, worker=worker)
        elif different:
            pair, difference = next(iter(different.items()))
            ended = len(case.drawings) >= _MOST
            self._log("audit_undecided" if ended else "audit_differs", case, difference, workers=list(pair))
        self._failures += len(wrong) or (equal is None and len(case.drawings) >= _MOST)
        return wrong

    def quarantine(self, worker: str) -> None:
        """Grant a worker nothing more; what it has drawn first is dropped, and what it has drawn again is not heard."""
        self.quarantined.add(worker)
        self.revoke(worker=worker)
        self._cases = [case for case in self._cases if case.drawings[0].worker != worker]
        for case in self._cases:
            case.drawings = [drawing for drawing in case.drawings if drawing.worker != worker]
        held = {id(case) for case in self._cases}
        for grant in self._grants.values():
            grant.cases = [case for case in grant.cases if id(case) in held]

    def clear(self) -> None:
        """Forget all rollouts, which are drawn again; workers that are wrong stay so."""
        self._cases, self._grants = [], {}

    def figures(self) -> dict[str, float]:
        """Return counts since the last call: rollouts audited, and those found wrong; {} if audits are off."""
        if not self.on:
            return {}
        found = {"audited": float(self._audited), "audit_failures": float(self._failures)}
        self._audited = self._failures = 0
        return found

    def _log(self, event: str, case: _Case, difference: Difference | None, **who: Any) -> None:
        if self._events is not None and difference is not None:
            name = {"step": case.lease.step, "version": case.lease.version, "prompt": case.prompt.id}
            what = {"differs": difference.what, "position": difference.position, "found": str(difference)}
            self._events.append("controller", event, **who, **name, sample=case.sample, **what)


def _malformed(lease: Lease, groups: Sequence[Group]) -> str | None:
    """Return what groups lack of a lease: its prompts in order, and one rollout and score for each sample."""
    if len(groups) != len(lease.prompts):
        return f"{len(groups)} groups for {len(lease.prompts)} prompts"
    for prompt, group in zip(lease.prompts, groups, strict=True):
        asked = (prompt.id, prompt.draw) == (group.prompt.id, group.prompt.draw)
        if not asked or not np.array_equal(prompt.tokens, group.prompt.tokens):
            return f"another prompt than {prompt.id}"
        names = [(rollout.prompt_id, rollout.sample_id, rollout.demonstration) for rollout in group.rollouts]
        if names != [(prompt.id, sample, False) for sample in range(lease.samples)] or len(names) != len(group.scores):
            return f"prompt {prompt.id} has not its {lease.samples} samples with their scores"
        if any(np.any(rollout.versions != lease.version) for rollout in group.rollouts):
            return f"prompt {prompt.id} has tokens that do not name version {lease.version}"
    return None
