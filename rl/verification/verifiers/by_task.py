"""A verifier of several tasks: each has a scorer of its own."""

from collections.abc import Sequence
from typing import Any, override

from axlearn_like.config import REQUIRED
from mesh.errors import did_you_mean
from rl.protocol.messages import Details
from rl.tasks.mixture import TaskMixture
from rl.tasks.source import ProblemSource
from rl.verification.scorers import Scorer


def labels_of(mixture: TaskMixture.Config) -> list[str]:
    """Return the labels of a mixture's tasks, in their order."""
    return [family.title for family in mixture.families if isinstance(family, ProblemSource.Config)]


class ByTask(Scorer):
    """The score of an answer by the scorer of its problem's task, or by `other`."""

    class Config(Scorer.Config):
        mixture: TaskMixture.Config = REQUIRED  # equal to the tasks that drew the problems
        scorers: dict[str, Scorer.Config] = REQUIRED  # scorers by the label of the task
        other: Scorer.Config = REQUIRED  # scorer of the tasks that are not named

        @override
        def confined(self) -> bool:
            return all(scorer.confined() for scorer in (*self.scorers.values(), self.other))

        @override
        def check_fields(self) -> None:
            labels = labels_of(self.mixture)
            for label in self.scorers:
                self.require("scorers", label in labels, f"labels of tasks{did_you_mean(label, labels)}")

    def __init__(self, cfg: Config):
        self._labels = labels_of(cfg.mixture)
        self._scorers: dict[str, Scorer] = {label: scorer.build() for label, scorer in cfg.scorers.items()}
        if others := set(self._labels) - set(self._scorers):  # else reading the tasks for `other` would be for nothing
            self._scorers |= dict.fromkeys(others, cfg.other.build())

    @override
    def score(self, problem_id: int, answer: str) -> Any:
        return self._of(problem_id).score(problem_id, answer)

    @override
    def score_samples(self, problem_id: int, answers: Sequence[str], details: Sequence[Details]) -> Sequence[Any]:
        return self._of(problem_id).score_samples(problem_id, answers, details)

    def _of(self, problem_id: int) -> Scorer:
        return self._scorers[self._labels[problem_id % len(self._labels)]]
