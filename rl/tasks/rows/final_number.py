r"""The final number of a worked answer, in the forms in which models write it.

What stands behind the marker, `####` by default, counts first, then the last `\boxed{}`, then what "the answer is"
says, then the last bold text, and else the last number of all, as published evaluations of such problems take it. A
form that is there but holds no number, or several, is no answer: an earlier number does not take its place.
"""

import re
from fractions import Fraction
from typing import NamedTuple

_LONGEST = 40  # digits of a number
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\d)])[-+])?\s?[$€£]?\s?(?P<sign2>[-+])?(?P<digits>{_DIGITS})(?:\s?/\s?(?P<below>\d+))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_SAID = re.compile(r"\banswer(?:\s+is\b|\s*:|\s*=)[:\s]*", re.IGNORECASE)
_OR = re.compile(r"\bor\b", re.IGNORECASE)
_BOLD = re.compile(r"\*\*(?P<text>[^*\n]+)\*\*")
_CLEAN = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "，": ","})


class FinalNumber(NamedTuple):
    """A number and the form in which it was found; None: the form has no readable number."""

    value: Fraction | None
    form: str


def final_number(text: str, marker: str = "####") -> FinalNumber:
    """Return the final number of an answer, and its form: "####", "boxed", "said", "bold", "last number" or "none".

    >>> from rl.tasks.rows.final_number import final_number
    >>> final_number("So it is 3 + 2. The answer is $5,000.00.")
    FinalNumber(value=Fraction(5000, 1), form='said')
    """
    text = text.translate(_CLEAN)
    if marker and marker in text:
        line = text.rpartition(marker)[2].strip().partition("\n")[0]
        return FinalNumber(_given(line), marker)
    if (boxed := _last_boxed(text)) is not None:
        return FinalNumber(_only(boxed), "boxed")
    if said := list(_SAID.finditer(text)):
        clause = re.split(r"\n|\.(?!\d)", text[said[-1].end() :], maxsplit=1)[0]
        if _all(clause):
            return FinalNumber(_given(clause), "said")
    if bold := [value for one in _BOLD.finditer(text) if (value := _only(one["text"])) is not None]:
        return FinalNumber(bold[-1], "bold")
    numbers = _all(text)
    return FinalNumber(numbers[-1], "last number") if numbers else FinalNumber(None, "none")


def _all(text: str) -> list[Fraction]:
    """Return the numbers of a text in order; those of too many digits are left out."""
    text = _FRACTION.sub(r"\1/\2", text.replace("\\$", "$").replace("{,}", ",").replace("\\,", "").replace("\\!", ""))
    found: list[Fraction] = []
    for match in _NUMBER.finditer(text):
        digits = match["digits"].replace(",", "")
        below = match["below"] or "1"
        if len(digits) + len(below) <= _LONGEST and int(below):
            value = Fraction(digits) / int(below)
            found.append(-value if "-" in (match["sign"] or "") + (match["sign2"] or "") else value)
    return found


def _given(phrase: str) -> Fraction | None:
    """Return the number that a phrase gives: the one behind an equals sign, else the first; None: it offers several."""
    numbers = _all(phrase.rpartition("=")[2]) or _all(phrase)
    return None if not numbers or (len(numbers) > 1 and _OR.search(phrase)) else numbers[0]


def _only(text: str) -> Fraction | None:
    """Return the one number of a text, behind its last equals sign; None: there is none, or there are several."""
    numbers = _all(text.rpartition("=")[2])
    return numbers[0] if len(numbers) == 1 else None


def _last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, up to the brace that closes it."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for at in range(start, min(len(text), start + 1000)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[start:at]
    return ""
