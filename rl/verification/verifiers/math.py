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
from rl.verification.verifiers.rows import RowScorer

__all__ = ["MathVerifier", "plain_number"]

_LONGEST = 2_000  # characters of an answer's expression
_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_WRAPPED = re.compile(r"\$+([^$]*)\$+|\\\((.*)\\\)|\\boxed\{([^{}]*|\\[dt]?frac\{\d+\}\{\d+\})\}")
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\{(\d{1,40})\}\{(\d{1,40})\}")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{0,40})?(?:/\d{1,40})?")


class MathVerifier(RowScorer):
    """1 for an answer of the same value as the reference: numbers, fractions, sets, intervals, expressions, with units.

    Of a longer text the last boxed expression counts, or the last that can be read (as in math-verify). A percentage
    equals both the number and its hundredth.
    """

    VERSION = 1

    class Config(RowScorer.Config):
        digits: int = 6
        """Numbers that are equal after rounding to so many digits are equal; fractions and integers must be exact."""
        strict: bool = True
        """Variables must have the same names, and a set is no tuple."""

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("digits", self.digits >= 1, "1 or more")

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
        self._reference = functools.lru_cache(maxsize=4096)(self._read)

    @override
    def judge(self, answer: str, reference: Any, problem: Problem) -> float:
        given, wanted = answer.strip(), str(reference).strip()
        first, second = plain_number(given), plain_number(wanted)
        if first is not None and second is not None:
            return float(first == second or self._close(given, wanted, first, second))
        if given == wanted:
            return 1.0
        if (same := same_value(given[-_LONGEST:], wanted, names=self._cfg.strict)) is not None:
            return float(same)
        expected = self._reference(wanted)
        if not expected:
            raise ValueError(f"the reference {wanted[:80]!r} is no mathematics")
        found = self._read(given[-_LONGEST:])
        return float(
            self._verify(
                expected, found, float_rounding=self._cfg.digits, strict=self._cfg.strict, timeout_seconds=None
            )
        )

    def _close(self, given: str, wanted: str, found: Fraction, expected: Fraction) -> bool:
        decimals = "." in given or "." in wanted
        return decimals and round(found, self._cfg.digits) == round(expected, self._cfg.digits)

    def _read(self, text: str) -> list[Any]:
        """Read the mathematics in a text. A text that is nothing else may lack the dollars around it."""
        if not _MARKED.search(text) and not _WORD.search(_COMMAND.sub("", text)):
            text = f"${text}$"
        return self._parse(text, extraction_config=self._settings, parsing_timeout=None)


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
