"""The verifier of mathematical answers: equal in value to the reference, in LaTeX or plain (`exact`).

A verdict takes less than a millisecond, and a hostile answer no longer: what would be too large to compute is equal to
its own text alone.
"""

import re
from typing import Any, override

from axlearn_like.input.encoding import field_of
from rl.protocol.messages import Problem
from rl.verification.verifiers.exact.final_text import final_text
from rl.verification.verifiers.exact.reading import Reading, read_answer
from rl.verification.verifiers.exact.verdict import MathRules, Verdict, compare_readings, unreadable
from rl.verification.verifiers.rows import RowScorer, last_match

_LONGEST = 2_000  # characters of an answer that are read, its last ones
_IN_PERCENT = re.compile(r"\b(?:what|which|as a|in|how many|the|find)\s+percent(?:age)?\b", re.IGNORECASE)


class MathVerifier(RowScorer):
    """1 for an answer of the same value as the reference, which says by its kind what counts (`exact/reading.py`).

    Of a longer text the boxes count, or what "the answer is" says. A reference in percent equals its hundredth, too; a
    number is also that number of percent where the question asks for them. `axl verify explain` shows how a reference
    and an answer are read.
    """

    VERSION = 3

    class Config(RowScorer.Config):
        # Numbers that are equal after rounding to so many digits are equal; fractions and integers must be exact.
        digits: int = 6
        strict: bool = True  # variables must have the same names, and a set is no tuple

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("digits", self.digits >= 1, "1 or more")

        @override
        def check_problem(self, problem: Problem) -> None:
            super().check_problem(problem)
            reference = str(problem.answer if self.field is None else field_of(problem.entry, self.field, "the row"))
            if self.reference_pattern is not None:
                reference = last_match(self.reference_pattern, reference) or ""
            where = f"problem {problem.id} of {problem.family!r} has {reference!r:.60}"
            self.require("field", bool(reference.strip()), f"a reference that is not empty; {where}")
            readable = not unreadable(read_answer(final_text(reference)))
            self.require("field", readable, f"a reference that can be read (`axl verify explain`); {where}")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._rules = MathRules(cfg.digits, cfg.strict)

    @override
    def judge(self, answer: str, reference: Any, problem: Problem | None) -> float:
        question = "" if problem is None else problem.question
        _, expected, verdict = self.explain(answer, str(reference), question)
        if unreadable(expected):
            raise ValueError(f"the reference cannot be read: {reference!r:.200}")
        return float(verdict.equal)

    def explain(self, answer: str, reference: str, question: str = "") -> tuple[Reading, Reading, Verdict]:
        """Return how answer and reference are read, and the verdict with its reason (ValueError: no reference)."""
        if not reference.strip():
            raise ValueError("the reference is empty")
        given, wanted = final_text(answer[-_LONGEST:]), final_text(reference)
        found, expected = read_answer(given), read_answer(wanted)
        if given and given == wanted:
            return found, expected, Verdict(True, "the same text")
        verdict = compare_readings(found, expected, self._rules)
        if not verdict.equal and found.unit == "%" and not expected.unit and _IN_PERCENT.search(question):
            verdict = compare_readings(found._replace(unit=""), expected, self._rules)
        return found, expected, verdict
