"""The base of verifiers that compare an answer with a problem's row."""

import abc
import collections
import re
from typing import Any, override

from axlearn_like.input.encoding import field_of, find_field
from mesh.errors import did_you_mean
from rl.protocol.messages import Problem
from rl.verification.scorers import TaskScorer


class RowScorer(TaskScorer, abc.ABC):
    """Scores an answer by the problem that it answers."""

    class Config(TaskScorer.Config):
        field: str | None = None  # field of the row that holds the reference; None: the problem's answer
        # Regular expression of which the last match in an answer is judged (its group 1, if it has one); an answer
        # without a match scores 0. None: the whole answer.
        answer_pattern: str | None = None
        reference_pattern: str | None = None  # the same for the reference, such as `#### (.+)`

        @override
        def confined(self) -> bool:
            return True

        @override
        def check_fields(self) -> None:
            for field in ("answer_pattern", "reference_pattern"):
                if (pattern := getattr(self, field)) is not None:
                    self.require(field, _compiles(pattern), "a regular expression")

        @override
        def check_problem(self, problem: Problem) -> None:
            has = self.field is None or find_field(problem.entry, self.field) is not None
            names = list(map(str, problem.entry))
            hint = "" if has else did_you_mean(str(self.field), names, limit=len(names))
            self.require("field", has, f"a field that the rows of family {problem.family!r} have{hint}")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._field = cfg.field
        self._answer_pattern, self._reference_pattern = cfg.answer_pattern, cfg.reference_pattern

    @abc.abstractmethod
    def judge(self, answer: str, reference: Any, problem: Problem) -> Any:
        """Return the reward of an answer to a problem, given the reference."""

    @override
    def score(self, problem_id: int, answer: str) -> Any:
        problem = self.problem(problem_id)
        at = f"the row of problem {problem.id}"
        reference = problem.answer if self._field is None else field_of(problem.entry, self._field, at)
        if self._reference_pattern is not None:
            found = last_match(self._reference_pattern, str(reference))
            if found is None:
                raise LookupError(f"the reference of problem {problem_id} has no {self._reference_pattern!r}")
            reference = found
        if self._answer_pattern is not None:
            found = last_match(self._answer_pattern, answer)
            if found is None:
                return 0.0
            answer = found
        return self.judge(answer, reference, problem)


def last_match(pattern: str, text: str) -> str | None:
    """Return group 1 of the last match, the whole match if there is no group, or None."""
    matches = collections.deque(re.finditer(pattern, text), maxlen=1)
    return (matches[0][1] if matches[0].re.groups else matches[0][0]) if matches else None


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
