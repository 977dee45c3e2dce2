r"""Kinds of mathematical answers: numbers, choices, words, times, lists, sets, intervals, points, matrices, equations.

A text is read as the first kind of which the whole text is one. What is none of them is an expression, which is
compared by its values.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rl.tasks.safe_answers import bracket_depth
from rl.verification.verifiers.exact.final_text import latex_of, unwrapped
from rl.verification.verifiers.exact.number import read_number
from rl.verification.verifiers.exact.quantity import read_quantity, split_unit

_LONGEST, _DEEPEST = 2_000, 10
_CHOICE = re.compile(r"(?:(?:option|choice|answer)\s+)?\(?([A-J])\)?", re.IGNORECASE)
_CHOSEN = re.compile(r"\(?([A-J])[).:]\s*+(?!and\b|or\b|,)(.*)", re.DOTALL)
_CHOICE_TEXT = re.compile(r"^\\(?:text|textbf|mathrm|mathbf)\s*\{\s*(\([A-J]\))\s*\}(?:\\[,;: ])*")
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::\d{2})?\s*([ap])?\.?(?:m\.?)?", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_DATE = re.compile(r"([A-Za-z]{3,9})\.? (\d{1,2})(?:st|nd|rd|th)?(?:,? (\d{4}))?")
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|array|cases)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_RELATION = re.compile(r"\\(?:le|ge)(?![A-Za-z])|<=|>=|[<>]")
_EQUALS = re.compile(r"(?<![<>!\\=])=(?!=)")
_OR = re.compile(r"\\lor(?![A-Za-z])|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_BOTH = re.compile(r"\\(p|m)[pm](?![A-Za-z])")  # \pm and \mp
_IN = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])")
_BUILDER = re.compile(r"\\\{\s*[a-z]\s*(?:\\mid|\||:)(.+)\\\}")
_EXCEPT = re.compile(r"\\mathbb\{R\}\s*(?:\\setminus|\\backslash|-)\s*\\\{(.+)\\\}|[a-z]\s*(?:\\neq?(?![a-z])|!=)(.+)")
_REALS = ("\\mathbb{R}", "\\mathbb R", "\\text{all real numbers}", "all real numbers", "all reals")
_PHRASES = {
    **dict.fromkeys(
        ("no solution", "no solutions", "no real solution", "no real solutions", "empty set"), r"\emptyset"
    ),
    **dict.fromkeys(("there is no solution", "there are no solutions", "the empty set"), r"\emptyset"),
    "dne": "does not exist",
}


class Reading(NamedTuple):
    """A text as a value of some kind."""

    # "number", "choice", "word", "time", "date", "list", "set", "union", "interval", "relation", "tuple", "matrix",
    # "determinant", "cases", "equation" or "expression"
    kind: str
    value: Any  # the `Fraction` of a number, the LaTeX of an expression, the parts of others as a tuple
    unit: str = ""  # unit of a number or an expression, such as "%", "$", "degree" or "cm"; "" without one
    decimals: bool = False  # the number was written with a decimal point
    text: str = ""  # the text as it was written, as LaTeX

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.kind} {_shown(self.value)}{unit}"


@functools.lru_cache(maxsize=8192)
def read_answer(text: str) -> Reading:
    """Return what a text is. It is that of an answer alone (`final_text`)."""
    text = unwrapped(text)
    if len(text) > _LONGEST or bracket_depth(text) > _DEEPEST:
        return Reading("expression", text, text=text)
    for read in (_time, _number, _choice, _date):
        if (found := read(text)) is not None:
            return found._replace(text=latex_of(text))
    latex = _IN.sub("", latex_of(text), count=1) if _IN.match(latex_of(text)) else latex_of(text)
    latex = latex.strip()
    for read in (_matrix, _set, _union, _bracketed, _inequality, _list, _equation, _word):
        if (found := read(latex)) is not None:
            return found._replace(text=latex)
    value, unit = split_unit(latex)
    return Reading("expression", value, unit, text=latex)


def _number(text: str) -> Reading | None:
    found = read_quantity(text)
    return None if found is None else Reading("number", *found)


def _choice(text: str) -> Reading | None:
    text = _CHOICE_TEXT.sub(r"\1 ", text).strip()
    if (found := _CHOICE.fullmatch(text)) is not None and found[1].isupper():
        return Reading("choice", (found[1],))
    if (found := _CHOSEN.fullmatch(text)) is None:
        return None
    if not (rest := found[2].strip()):
        return Reading("choice", (found[1],))
    behind = read_answer(rest)
    return None if behind.kind == "choice" else Reading("choice", (found[1], behind))


def _time(text: str) -> Reading | None:
    found = _TIME.fullmatch(text)
    return None if found is None else Reading("time", (int(found[1]), int(found[2]), (found[3] or "").lower()))


def _date(text: str) -> Reading | None:
    found = _DATE.fullmatch(text)
    return None if found is None else Reading("date", (found[1][:3].lower(), int(found[2]), found[3] or ""))


def _word(text: str) -> Reading | None:
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip().rstrip(".!").replace("\\ ", " ")
    if _WORDS.fullmatch(words) is None or (len(words) < 2 and text == words) or words.lower() in ("pi", "exp"):
        return None
    word = " ".join(words.casefold().split())
    return Reading("set", ()) if _PHRASES.get(word) == r"\emptyset" else Reading("word", _PHRASES.get(word, word))


def _matrix(text: str) -> Reading | None:
    inner = text[1:-1].strip() if text[:1] in ("(", "[") and text[-1:] in (")", "]") else text
    if (found := _MATRIX.fullmatch(inner)) is None or "\\begin" in found[2]:
        return None
    kind = {"v": "determinant", "c": "cases"}.get(found[1][0].lower(), "matrix") if found[1] != "array" else "matrix"
    rows = [row for row in re.split(r"\\\\(?:\[[^]]*\])?", found[2]) if row.strip()]
    return Reading(kind, tuple(tuple(read_answer(cell.strip()) for cell in row.split("&")) for row in rows))


def _set(text: str) -> Reading | None:
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return Reading("set", ())
    if (found := _BUILDER.fullmatch(text)) is not None:
        inner = read_answer(found[1].strip())
        return inner if inner.kind in ("interval", "union") else None
    if text.startswith(r"\{") and text.endswith(r"\}"):
        parts = _parts(text[2:-2])
    elif text.startswith("{") and text.endswith("}") and "," in text:
        parts = _parts(text[1:-1])
    else:
        return None
    return None if parts is None else Reading("set", _read(parts))


def _union(text: str) -> Reading | None:
    if text in _REALS:
        return _between(r"-\infty", r"\infty")
    if (found := _EXCEPT.fullmatch(text)) is not None:
        points = _parts(found[1] or found[2]) or []
        values = [read_number(point) for point in points]
        if len(points) != 1 and None in values:
            return None
        ordered = sorted(points, key=lambda point: read_number(point) or (0, False))
        ends = [r"-\infty", *ordered, r"\infty"]
        return Reading("union", tuple(map(_between, ends, ends[1:])))
    parts = _parts(text.replace(r"\cup", ";")) if r"\cup" in text else None
    if parts is None and _RELATION.search(text) and len(alternatives := _OR.split(text)) > 1:
        parts = alternatives if all(map(_RELATION.search, alternatives)) else None
    if parts is None or len(parts) < 2:
        return None
    read = _read(parts)
    if all(one.kind == "set" for one in read):
        return Reading("set", tuple(part for one in read for part in one.value))
    return Reading("union", read)


def _between(low: str, high: str) -> Reading:
    return Reading("interval", (read_answer(low), False, read_answer(high), False))


def _list(text: str) -> Reading | None:
    if _BOTH.search(text):
        both = [_BOTH.sub(lambda found, sign=sign: sign[found[1] == "m"], text) for sign in ("+-", "-+")]
        return Reading("list", _read(both))
    parts = _parts(_OR.sub(", ", text))
    return None if parts is None or len(parts) < 2 else Reading("list", _read(parts))


def _read(parts: Sequence[str]) -> tuple[Reading, ...]:
    return tuple(read_answer(part) for part in parts)


def _parts(text: str) -> list[str] | None:
    """Return what stands between the commas outside of brackets; None: brackets do not match."""
    parts, depth = [""], 0
    if read_number(text) is not None:
        return [text]
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return None
        if sign in ",;" and not depth and text[place - 1 : place] != "\\":
            parts.append("")
        else:
            parts[-1] += sign
    return None if depth else [part for part in (unwrapped(part) for part in parts) if part]


def _bracketed(text: str) -> Reading | None:
    """Return an interval or a point of two numbers, or a point of more."""
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")")
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]") or (parts := _parts(text[1:-1])) is None:
        return None
    if len(parts) == 2:
        low, high = _read(parts)
        return Reading("interval", (low, text[0] == "[", high, text[-1] == "]"))
    return Reading("tuple", _read(parts)) if len(parts) > 2 else None


def _inequality(text: str) -> Reading | None:
    signs, sides = _RELATION.findall(text), [side.strip() for side in _RELATION.split(text)]
    if len(signs) not in (1, 2) or _EQUALS.search(_RELATION.sub("", text)) or not all(sides) or "," in text:
        return None
    closed = [sign in (r"\le", r"\ge", "<=", ">=") for sign in signs]
    up = [sign in (r"\le", "<=", "<") for sign in signs]
    letters = [bool(re.fullmatch(r"\\?[A-Za-z]+", side)) and side != r"\infty" for side in sides]
    if len(signs) == 2:
        if letters != [False, True, False] or up[0] != up[1]:
            return None
        ends = (sides[0], closed[0], sides[2], closed[1]) if up[0] else (sides[2], closed[1], sides[0], closed[0])
    elif letters[0] == letters[1]:
        low, high = sides if up[0] else sides[::-1]
        return Reading("relation", (read_answer(low), closed[0], read_answer(high), closed[0]))
    else:
        above = up[0] == letters[0]  # x < 3 and 3 > x end at 3
        number = sides[1] if letters[0] else sides[0]
        ends = (r"-\infty", False, number, closed[0]) if above else (number, closed[0], r"\infty", False)
    return Reading("interval", (read_answer(ends[0]), ends[1], read_answer(ends[2]), ends[3]))


def _equation(text: str) -> Reading | None:
    sides = [side.strip() for side in _EQUALS.split(text)]
    return Reading("equation", tuple(sides)) if len(sides) > 1 and all(sides) and len(sides) < 8 else None


def _shown(value: Any) -> str:
    if isinstance(value, Reading):
        return _shown(value.value) + (f" {value.unit}" if value.unit else "")
    return f"({', '.join(map(_shown, value))})" if isinstance(value, tuple) else str(value)
