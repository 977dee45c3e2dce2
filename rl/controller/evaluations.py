"""The evaluations of a run: which versions are due, the leases of their problems, and the results on disk."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.files.written import open_written, replace_file
from rl.controller.config import ControllerConfig
from rl.controller.ledger import Ledger, WorkItem
from rl.controller.memory import RolloutMemory
from rl.environments.scoring import answer_of
from rl.evaluation.evaluator import Evaluation
from rl.evaluation.paired import write_right
from rl.protocol.messages import Group, Lease, Problem, Prompt
from rl.tasks.mixture import TaskMixture
from rl.tasks.prompts import PromptMaker

METRICS = "evaluation/"  # prefix of an evaluation's metrics


class EvaluationSchedule:
    """The controller's record of evaluations. One version is evaluated at a time; not thread-safe.

    The version before the first update is evaluated before training begins, the last one when training is over, those
    between while it goes on: an evaluation must be complete before the update that makes the next version to evaluate.
    What is finished is known from the run directory, so a controller that restarts repeats at most the one in hand.
    """

    def __init__(
        self,
        cfg: Evaluation.Config,
        controller: ControllerConfig[Any],
        run: RunDirectory,
        tokenizer: Tokenizer,
        *,
        every: int | None,
        seed: int,
        first_lease: int,
    ):
        """Store the settings.

        Args:
            controller: has the tasks whose held-out problems are drawn, samples, problems of a lease, and updates.
            every: updates between evaluations; None: there are none during training.
            seed: seed of the bootstrap of confidence intervals.
            first_lease: larger than any lease id in use.
        """
        self._cfg, self._run, self._tokenizer, self._seed = cfg, run, tokenizer, seed
        self._tasks: ConfigBase[TaskMixture] = controller.tasks
        self._samples, self._per_lease = controller.samples_per_prompt, controller.groups_per_lease
        self._every, self._first_lease, self._next_lease = every, first_lease, first_lease
        self._num_steps = self._last = controller.num_steps  # the last version
        self._events = EventLog(run.events_path)
        self._published = self._begun = -1
        self._done: set[int] = set()  # versions
        self._pending: list[int] = []  # versions that can be pulled, oldest first
        self._evaluators: set[str] = set()  # workers that evaluate while others train
        self._incarnation = 0
        self._version: int | None = None  # state of the current evaluation
        self._ledger: Ledger | None = None
        self.problems: list[Problem] = []
        self._prompts: list[Prompt] = []
        self._vote: dict[int, Callable[[str], str]] = {}  # problem id -> vote of an answer
        self._votes: dict[int, tuple[str, ...]] = {}  # state of the current evaluation
        self._memory = RolloutMemory(0 if every is None else cfg.earlier_tokens)

    def prepare(self, maker: PromptMaker) -> None:
        """Make the held-out problems; once, before the first lease."""
        tasks = self._tasks.build()
        tasks.admission = maker
        problems = tasks.heldout(self._cfg.problems_per_family)
        self.problems, self._prompts = problems, [maker.prompt(problem) for problem in problems]
        self._vote = {problem.id: functools.partial(tasks.vote, problem) for problem in problems}

    @property
    def version(self) -> int | None:
        """The version that is due or in hand; None: there is nothing to evaluate now."""
        return self._pending[0] if self._pending else None

    @property
    def before_training(self) -> bool:
        """True while the version before the first update is not evaluated: training waits for it."""
        return self._begun == 0 and self.version == 0

    def holds(self, step: int) -> bool:
        """Return True if update `step`, which makes version step + 1, has to wait for an evaluation."""
        return self.version is not None and self._is_due(step + 1)

    def begin(self, step: int, incarnation: int, held: int | None = None) -> None:
        """Start or resume at update `step`; evaluations in hand begin again. `held`: an older version, still there."""
        self._published = self._begun = step
        self._last, self._incarnation = max(self._num_steps, step), incarnation
        kept = keep_evaluations(self._run, step)  # later versions will be made again
        self._done = {row["step"] for row in kept} - {0, self._last}
        self._done |= {v for v in (0, self._last) if is_evaluated(self._run, self._when(v), v)}
        due = {v for v in (held, step) if v is not None and self._is_due(v)}
        self._pending = sorted(due - self._done)
        self._version = self._ledger = None
        self._evaluators.clear()
        lost = step - step % self._every if self._every else 0
        if lost and lost not in (*self._done, *due):
            self._events.append("controller", "evaluation_lost", version=lost)

    def published(self, version: int) -> None:
        """Record that a version can be pulled."""
        if version > self._published:
            self._published = version
            if self._is_due(version) and version not in self._done:
                self._pending.append(version)

    def finish(self, step: int) -> None:
        """Make `step` the last version."""
        if step == self._last:
            return
        self._last = step
        if not is_evaluated(self._run, "after", step):
            self._done.discard(step)
            if self._published >= step and step not in self._pending:
                self._pending.append(step)

    def takes(self, worker: str, workers: int, *, idle: bool) -> bool:
        """Return True if this worker, of so many, is to evaluate now. `idle`: there is nothing else to do.

        During training a quarter of the workers evaluate, each to the end, since changing versions costs a pull. A
        single worker takes turns.
        """
        if self.version is None:
            return False
        if self.before_training or self._published >= self._last or (idle and self.holds(self._published)):
            return True
        if workers > 1:
            return worker in self._evaluators or len(self._evaluators) < max(1, workers // 4)
        return idle or worker not in self._evaluators

    def _is_due(self, version: int) -> bool:
        return version in (0, self._last) or bool(self._every and version % self._every == 0)

    def lease(self, worker: str, now: float, seconds: float) -> tuple[WorkItem, Lease] | None:
        """Grant problems of the evaluation that is due; None if there is none, or all are granted."""
        version = self.version
        if version is None:
            return None
        if self._ledger is None or self._version != version:
            items = -(-len(self.problems) // self._per_lease)
            self._ledger, self._version, self._votes = Ledger(items, self._next_lease), version, {}
            self._ledger.skip_to(version)
        item = self._ledger.lease(worker, range(version, version + 1), now, seconds)
        self._next_lease = self._ledger.next_lease
        if item is None:
            return None
        self._evaluators.add(worker)
        prompts = tuple(self._prompts[item.index * self._per_lease : (item.index + 1) * self._per_lease])
        sizes: dict[str, Any] = {"prompts": prompts, "samples": self._samples, "version": version}
        sizes["earlier"] = self._memory.of(prompts)
        lease = Lease(item.lease, version, seconds=seconds, incarnation=self._incarnation, evaluation=True, **sizes)
        return item, lease

    @property
    def pending(self) -> bool:
        """True if `lease` would grant problems now."""
        if (version := self.version) is None or self._ledger is None or self._version != version:
            return version is not None
        return self._ledger.pending(range(version, version + 1)) is not None

    def owns(self, lease: int) -> bool:
        """Return True for a lease of an evaluation, in hand or not."""
        return lease >= self._first_lease

    def ledger(self, lease: int) -> Ledger | None:
        """Return the ledger of the evaluation in hand; None if the lease is not of an evaluation."""
        return self._ledger if self.owns(lease) else None

    def trains(self, worker: str) -> None:
        """Record that a worker has taken a lease of an update."""
        self._evaluators.discard(worker)

    def revoke(self, *, worker: str = "", now: float = -math.inf) -> list[WorkItem]:
        """Revoke the leases of a worker that is gone, and those whose time is over; returns their items."""
        self._evaluators.discard(worker)
        return [] if self._ledger is None else [*self._ledger.release(worker), *self._ledger.expire(now)]

    def votes(self, groups: Sequence[Group]) -> dict[int, tuple[str, ...]]:
        """Return what the samples vote for, by problem; thread-safe, for it decodes all answers."""
        return {
            group.prompt.id: tuple(
                self._vote[group.prompt.id](answer_of(rollout, self._tokenizer)) for rollout in group.rollouts
            )
            for group in groups
        }

    def verified(self, lease: int, groups: Sequence[Group], votes: Mapping[int, tuple[str, ...]]) -> bool:
        """Accept scored answers and their votes; write the results when all are there. False if the lease is void."""
        if self._ledger is None or self._version is None:
            return False
        # One rollout is shown; the others could be many gigabytes.
        kept = tuple(dataclasses.replace(group, rollouts=group.rollouts[:1]) for group in groups)
        if not self._ledger.verified(lease, kept):
            return False
        self._votes |= votes
        self._memory.remember(groups)
        if self._ledger.complete(self._version):
            self._write(self._version, self._ledger.batch(self._version))
            self._done.add(self._version)
            self._pending.remove(self._version)
            self._version = self._ledger = None
            self._evaluators.clear()
        return True

    def result(self, version: int) -> dict[str, float] | None:
        """Return the figures of all families together, as `evaluation/pass@1`; None if they are not there yet."""
        if version not in self._done:
            return None
        row = next(row for row in read_rows(evaluations_path(self._run)) if row["step"] == version)
        return {f"{METRICS}{name}": value for name, value in row.items() if isinstance(value, float)}

    def _write(self, version: int, groups: Sequence[Group]) -> None:
        votes = [self._votes[group.prompt.id] for group in groups]
        summary, rows = self._cfg.build().summarise(self.problems, groups, votes, self._tokenizer, self._seed)
        result = {"step": version, **summary}
        with open_written(evaluations_path(self._run)) as file:
            file.write(json.dumps(result) + "\n")
        write_right(self._run.path, version, groups, self._seed)
        if version in (0, self._last):
            when = self._when(version)
            lines = [json.dumps({"phase": f"eval_{when}", "step": version, **row}) for row in rows]
            replace_file(self._run.rollouts / f"eval_{when}.jsonl", "\n".join(lines) + "\n")
            replace_file(result_path(self._run, when), json.dumps(result, indent=2) + "\n")
        self._events.append("controller", "evaluated", version=version, **{"pass@1": summary.get("pass@1")})

    def _when(self, version: int) -> str:
        return "before" if version == 0 else "after"


def evaluations_path(run: RunDirectory) -> Path:
    """Return the file with the summaries of all evaluations, in the order in which they were finished."""
    return run.path / "evaluations.jsonl"


def keep_evaluations(run: RunDirectory, step: int) -> list[dict[str, Any]]:
    """Return the summaries of versions up to `step`, one each; the others are dropped from the file."""
    rows = read_rows(evaluations_path(run))
    kept = {row["step"]: row for row in rows if row["step"] <= step}
    if len(kept) < len(rows):
        replace_file(evaluations_path(run), "".join(json.dumps(row) + "\n" for row in kept.values()))
    return list(kept.values())


def result_path(run: RunDirectory, when: str) -> Path:
    """Return the file with the summary of the evaluation "before" or "after" RL."""
    return run.path / f"eval_{when}.json"


def is_evaluated(run: RunDirectory, when: str, version: int) -> bool:
    """Return True if the run directory has the result of this version."""
    path = result_path(run, when)
    return path.exists() and json.loads(path.read_text())["step"] == version
