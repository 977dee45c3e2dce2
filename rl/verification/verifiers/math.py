"""The verifier of mathematical answers: equal in value to the reference, in LaTeX or plain, by math-verify and sympy.

Parsing and comparing may take for ever, so this belongs in `Verifier`, whose processes have a deadline. Two plain
numbers are compared as fractions before that: most answers of a training run are such.
"""

import functools
import importlib
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, override

from mesh.errors import UserError
from rl.roles.messages import Problem
from rl.verification.verifiers.exact.comparison import same_value
from rl.verification.verifiers.exact.final_text import final_text
from rl.verification.verifiers.exact.reading import Reading, read_answer
from rl.verification.verifiers.exact.verdict import Verdict, close_numbers, compare_readings
from rl.verification.verifiers.rows import RowScorer

__all__ = ["MathVerifier", "plain_number"]

_LONGEST = 2_000  # characters of an answer's expression
_LONGEST_EXPRESSION, _DEEPEST = 400, 10
_RELATION = re.compile(r"[<>]|\\[lg]eq?(?![A-Za-z])")
_COMMAND, _LETTER = re.compile(r"\\[A-Za-z]+"), re.compile(r"[A-Za-z]")
_WORD = re.compile(r"[A-Za-z]{3,}")
_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed")
# Towers of powers, long exponents and large factorials, which sympy would begin to compute.
_HUGE = re.compile(
    r"\^\s*\{?[^{}^]*\d[^{}^]*\^|\^\s*\{?-?\s*\d{4,}|\d{3,}\s*\}?\)?!|!\s*!|(?:\d\s*\}?\s*\^\s*\{?\(?\s*){2}"
)
_WRAPPED = re.compile(r"\$+([^$]*)\$+|\\\((.*)\\\)|\\boxed\{([^{}]*|\\[dt]?frac\{\d+\}\{\d+\})\}")
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\{(\d{1,40})\}\{(\d{1,40})\}")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{0,40})?(?:/\d{1,40})?")


class MathVerifier(RowScorer):
    """1 for an answer of the same value as the reference, which says by its kind what counts (`exact/reading.py`).

    Of a longer text the boxes count, or what "the answer is" says, or the last expression that can be read. A reference
    in percent equals its hundredth, too. `axl verify explain` shows how a reference and an answer are read.
    """

    VERSION = 2

    class Config(RowScorer.Config):
        digits: int = 6
        """Numbers that are equal after rounding to so many digits are equal; fractions and integers must be exact."""
        strict: bool = True
        """Variables must have the same names, and a set is no tuple."""

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("digits", self.digits >= 1, "1 or more")

        @override
        def check_problem(self, problem: Problem) -> None:
            super().check_problem(problem)
            reference = problem.answer if self.field is None else problem.entry[self.field]
            reading = f"a reference that is not empty; problem {problem.id} of {problem.family!r} has {reference!r:.60}"
            self.require("field", bool(str(reference).strip()), reading)

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg
        try:
            library = importlib.import_module("math_verify")
        except ModuleNotFoundError as error:
            raise UserError("MathVerifier needs math-verify: pip install 'math-verify>=0.9'") from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
        self._parse: Callable[..., list[Any]] = library.parse
        self._verify: Callable[..., bool] = library.verify
        self._settings = [library.LatexExtractionConfig(), library.ExprExtractionConfig()]
        # Samples of one prompt often agree, and a library's verdict takes some milliseconds.
        self._by_library = functools.lru_cache(maxsize=8192)(self._ask_library)
        self._read = functools.lru_cache(maxsize=8192)(self._parse_text)

    @override
    def judge(self, answer: str, reference: Any, problem: Problem) -> float:
        given, wanted = answer.strip(), str(reference).strip()
        first, second = plain_number(given), plain_number(wanted)
        if first is not None and second is not None:
            return float(first == second or self._close(given, wanted, first, second))
        return float(self.explain(given, wanted)[2].equal)

    def explain(self, answer: str, reference: str) -> tuple[Reading, Reading, Verdict]:
        """Return how an answer and a reference are read, and the verdict with its reason.

        Raises:
            ValueError: the reference is empty.
        """
        if not reference.strip():
            raise ValueError("the reference is empty")
        given, wanted = final_text(answer[-_LONGEST:]), final_text(reference)
        found, expected = read_answer(given), read_answer(wanted)
        if given and given == wanted:
            return found, expected, Verdict(True, "the same text")
        return found, expected, self._compare(found, expected)

    def _compare(self, found: Reading, expected: Reading) -> Verdict:
        return compare_readings(found, expected, self._same, self._cfg.digits)

    def _same(self, found: Reading, expected: Reading) -> bool:
        """Compare expressions: those of simple mathematics exactly, others by math-verify."""
        given, wanted = (one.value if one.kind == "expression" else _shown(one) for one in (found, expected))
        if (same := same_value(given, wanted, names=self._cfg.strict)) is not None:
            return same
        if _RELATION.search(given) and not _RELATION.search(wanted):
            return False
        sides = given.split("=")
        if len(sides) > 1 and "=" not in wanted:  # 2 + 3 = 5, x = 5; in 6 = 5 a side is wrong
            said = [read_answer(side) for side in sides[:-1] if not _LETTER.search(_COMMAND.sub("", side))]
            said.append(read_answer(sides[-1]))
            return all(self._compare(one, expected).equal for one in said)
        if not (_simple(given) and _simple(wanted)):
            return False
        if _HUGE.search(given) or _HUGE.search(wanted):
            return "".join(given.split()) == "".join(wanted.split())  # a value that nobody writes out
        return self._by_library(given, wanted)

    def _ask_library(self, given: str, wanted: str) -> bool:
        read, answers = self._read(wanted), self._read(given)
        rounding = {"float_rounding": self._cfg.digits, "strict": self._cfg.strict, "timeout_seconds": None}
        return bool(read and answers) and bool(self._verify(read, answers, **rounding))

    def _close(self, given: str, wanted: str, found: Fraction, expected: Fraction) -> bool:
        return ("." in given or "." in wanted) and close_numbers(found, expected, self._cfg.digits)

    def _parse_text(self, text: str) -> list[Any]:
        """Read the mathematics in a text, which may lack the dollars around it."""
        sentence = _WORD.search(_COMMAND.sub("", text)) and " " in text
        text = text if _MARKED.search(text) or sentence else f"${text}$"
        return self._parse(text, extraction_config=self._settings, parsing_timeout=None)


def _simple(text: str) -> bool:
    """Return True for an expression that math-verify reads in a moment: short, its brackets closed and not deep."""
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return len(text) <= _LONGEST_EXPRESSION and deepest <= _DEEPEST


def _shown(one: Reading) -> str:
    """Return a plain value as LaTeX, to be compared with an expression."""
    if one.kind == "number" and not one.unit and not one.decimals:
        value = one.value
        return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return one.text


def plain_number(text: str) -> Fraction | None:
    r"""Return the value of 1,234.5, -3/4, 007, $5$ or \\boxed{\\frac{1}{2}}; None for another text."""
    while (inner := _WRAPPED.fullmatch(text)) is not None:
        text = next(group for group in inner.groups() if group is not None).strip()
    text = _FRACTION.sub(r"\1\2/\3", text) if _FRACTION.fullmatch(text) else text
    if _NUMBER.fullmatch(text) is None:
        return None
    try:
        top, _, bottom = text.replace(",", "").partition("/")
        return Fraction(top) / (Fraction(bottom) if bottom else 1)
    except (ValueError, ZeroDivisionError):
        return None
