"""Terms of a reward: their base, and those of an answer's length, form and verifier."""

import abc
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, override

from axlearn_like.config import REQUIRED, Configurable
from rl.protocol.messages import Details, Problem
from rl.verification.scorers import Scorer, ScoringConfig


class Term(Configurable, abc.ABC):
    """A part of a reward."""

    VERSION: ClassVar[int] = 1  # raised when the class computes other values than before, as `Scorer.VERSION`

    class Config(ScoringConfig["Term"]):
        name: str | None = None  # name of the term in metrics; None: its function's or class's
        weight: float = 1.0
        gate: bool = False  # the weighted sum is multiplied by the term, which no weight applies to: 0 closes it

        def title(self) -> str:
            """Return the name of the term in metrics."""
            return self.name or (self.__owner__ or type(self)).__name__.lower()

        @override
        def negative(self) -> str | None:
            return "weight" if self.weight < 0 and not self.gate else None

    @abc.abstractmethod
    def values(self, problem: Problem, answers: Sequence[str], details: Sequence[Details]) -> Sequence[Any]:
        """Return a number, or named numbers, for each answer."""


class Length(Term):
    """1 up to `free` tokens, falling to 0 at `most`."""

    class Config(Term.Config):
        free: int = 0
        most: int = REQUIRED

        @override
        def wants(self) -> frozenset[str]:
            return frozenset({"tokens"})

        @override
        def check_fields(self) -> None:
            self.require("most", 0 <= self.free < self.most, "more than `free`, which is 0 or more")

    def __init__(self, cfg: Config):
        self._free, self._most = cfg.free, cfg.most

    @override
    def values(self, problem: Problem, answers: Sequence[str], details: Sequence[Details]) -> Sequence[float]:
        over = [(len(one["tokens"]) - self._free) / (self._most - self._free) for one in details]
        return [1.0 - min(1.0, max(0.0, share)) for share in over]


class Format(Term):
    """1 for an answer of which the whole matches a regular expression."""

    class Config(Term.Config):
        pattern: str = REQUIRED

        @override
        def check_fields(self) -> None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                self.require("pattern", False, f"a regular expression ({error})")

    def __init__(self, cfg: Config):
        self._pattern = re.compile(cfg.pattern, re.DOTALL)

    @override
    def values(self, problem: Problem, answers: Sequence[str], details: Sequence[Details]) -> Sequence[float]:
        return [float(self._pattern.fullmatch(answer) is not None) for answer in answers]


class Verified(Term):
    """The score of a verifier, such as `MathVerifier`."""

    class Config(Term.Config):
        verifier: Scorer.Config = REQUIRED

        @override
        def title(self) -> str:
            return self.name or (self.verifier.__owner__ or type(self.verifier)).__name__.lower()

    def __init__(self, cfg: Config):
        self._verifier: Scorer = cfg.verifier.build()

    @override
    def values(self, problem: Problem, answers: Sequence[str], details: Sequence[Details]) -> Sequence[Any]:
        scores = self._verifier.score_samples(problem.id, answers, details)
        return [score["reward"] if isinstance(score, Mapping) else score for score in scores]
