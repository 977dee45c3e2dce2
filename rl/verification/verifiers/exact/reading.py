r"""Kinds of mathematical answers: numbers with units, choices, words, times, lists, sets, intervals, matrices.

A text is read as the first kind of which the whole text is one. What is none of them is an expression, which another
reader compares.
"""

import functools
import re
from typing import Any, NamedTuple

from rl.verification.verifiers.exact.final_text import DOLLAR, latex_of, unwrapped
from rl.verification.verifiers.exact.number import read_number

__all__ = ["Reading", "read_answer"]

_MONEY = {
    "$": "$",
    "€": "€",
    "£": "£",
    "dollar": "$",
    "usd": "$",
    "euro": "€",
    "eur": "€",
    "cent": "cent",
    "pound": "£",
}
_UNITS = {
    **dict.fromkeys(("millimeter", "millimetre", "mm"), "mm"),
    **dict.fromkeys(("centimeter", "centimetre", "cm"), "cm"),
    **dict.fromkeys(("meter", "metre", "m"), "m"),
    **dict.fromkeys(("kilometer", "kilometre", "km"), "km"),
    **dict.fromkeys(("inch", "inche", "in"), "in"),
    **dict.fromkeys(("foot", "feet", "ft"), "ft"),
    **dict.fromkeys(("mile", "mi"), "mi"),
    **dict.fromkeys(("gram", "g"), "g"),
    **dict.fromkeys(("kilogram", "kg"), "kg"),
    **dict.fromkeys(("pound", "lb"), "lb"),
    **dict.fromkeys(("second", "sec", "s"), "s"),
    **dict.fromkeys(("minute", "min"), "min"),
    **dict.fromkeys(("hour", "hr", "h"), "h"),
    **dict.fromkeys(("liter", "litre", "l"), "l"),
    **dict.fromkeys(("mph",), "mi/h"),
    **dict.fromkeys(("kmh", "kph"), "km/h"),
    **dict.fromkeys(("degree", "deg"), "degree"),
}
_UNIT = re.compile(r"[A-Za-z]+(?:[ /*][A-Za-z]+)*(?:\^\{?-?\d\}?)?")
_BEHIND = re.compile(
    r"(?P<number>.*?[\d}½⅓⅔¼¾])\s*(?:\\[,; ])?\s*(?P<unit>[A-Za-z][A-Za-z /^{}\d-]*|\\?%|\^\{?\\circ\}?.*)"
)
_PERCENT = re.compile(r"(?P<number>.*?)\s*(?:\\?%|percent|per cent)")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(r"\(?([A-J])(?:[).:]\s.*|[).:])", re.DOTALL)
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::\d{2})?\s*([ap])?\.?(?:m\.?)?", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_DATE = re.compile(r"([A-Za-z]{3,9})\.? (\d{1,2})(?:st|nd|rd|th)?(?:,? (\d{4}))?")
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|array|cases)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_RELATION = re.compile(r"\\(?:le|ge)(?![A-Za-z])|<=|>=|[<>]")
_LETTERS = re.compile(r"[A-Za-z]")
_OR = re.compile(r"\\lor(?![A-Za-z])|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")


class Reading(NamedTuple):
    """A text as a value of some kind.

    Attributes:
        kind: "number", "choice", "word", "time", "date", "list", "set", "interval", "matrix" or "expression".
        value: the `Fraction` of a number, the LaTeX of an expression, the parts of others as a tuple.
        unit: unit of a number, such as "%", "$", "degree" or "cm"; "" without one.
        decimals: the number was written with a decimal point.
    """

    kind: str
    value: Any
    unit: str = ""
    decimals: bool = False
    text: str = ""  # as it was written, as LaTeX

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        value = self.value if not isinstance(self.value, tuple) else ", ".join(map(str, self.value))
        return f"{self.kind} {value}{unit}"


@functools.lru_cache(maxsize=8192)
def read_answer(text: str) -> Reading:
    """Return what a text is. It is that of an answer alone (`final_text`)."""
    text = unwrapped(text)
    for read in (_number, _choice, _time, _date, _matrix, _set, _interval, _list, _word):
        if (found := read(text)) is not None:
            return found._replace(text=latex_of(text))
    return Reading("expression", latex_of(text), text=latex_of(text))


def _number(text: str) -> Reading | None:
    text = text.replace(DOLLAR, "$").replace("\\left", "").replace("\\right", "")
    text = re.sub(r"^[A-Za-z]\s*=\s*", "", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}", r" \1", text).strip()
    unit = ""
    if (found := _PERCENT.fullmatch(text)) is not None:
        text, unit = found["number"], "%"
    elif text[:3].lower() in _MONEY and text[3:4] in (" ", "$"):
        unit, text = _MONEY[text[:3].lower()], text[3:].lstrip(" $")
    elif text[:1] in _MONEY or text[:2] in ("-$", "-€", "-£"):
        unit, text = _MONEY[text.lstrip("-")[0]], text.replace(text.lstrip("-")[0], "", 1)
    if (value := read_number(text.replace("°", "^\\circ"))) is not None:
        return Reading("number", value[0], unit, value[1])
    if not unit and (found := _BEHIND.fullmatch(text.replace("°", "^\\circ"))) is not None:
        unit = _unit_of(found["unit"])
        if unit is not None and (value := read_number(found["number"])) is not None:
            return Reading("number", value[0], unit, value[1])
    return None


def _unit_of(text: str) -> str | None:
    text = text.strip().strip(".")
    if text.startswith("^"):
        return "degree" if re.fullmatch(r"\^\{?\\circ\}?", text) else None
    if _UNIT.fullmatch(text) is None or (len(text) == 1 and text not in "mgshl"):
        return None  # 2x is no number of xs
    if text.lower() in ("pi", "sqrt", "sin", "cos", "tan", "log", "ln", "i", "e", "and", "or", "x", "y", "am", "pm"):
        return None
    words = re.sub(r"\s*(?:per| a |/)\s*", "/", text.lower()).split("/")
    return "/".join(_one_unit(word.strip()) for word in words)


def _one_unit(word: str) -> str:
    for name in (word, word.removesuffix("s")):
        if name in _UNITS or name in _MONEY:
            return _UNITS.get(name) or _MONEY[name]
    return word.removesuffix("s") if len(word) > 3 else word


def _choice(text: str) -> Reading | None:
    found = _CHOICE.fullmatch(text) or _CHOSEN.fullmatch(text)
    return None if found is None else Reading("choice", found[1])


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
    return Reading("word", " ".join(words.casefold().split()))


def _matrix(text: str) -> Reading | None:
    found = _MATRIX.fullmatch(latex_of(text))
    if found is None:
        return None
    kind = {"v": "determinant", "c": "cases"}.get(found[1][0].lower(), "matrix") if found[1] != "array" else "matrix"
    rows = [row for row in re.split(r"\\\\(?:\[[^]]*\])?", found[2]) if row.strip()]
    cells = tuple(tuple(read_answer(cell.strip()) for cell in row.split("&")) for row in rows)
    return Reading(kind, cells)


def _set(text: str) -> Reading | None:
    text = latex_of(text)
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return Reading("set", ())
    if not (text.startswith(r"\{") and text.endswith(r"\}")) or "|" in text or r"\mid" in text or ":" in text:
        return None
    parts = _parts(text[2:-2])
    return None if parts is None else Reading("set", tuple(read_answer(part) for part in parts))


def _list(text: str) -> Reading | None:
    parts = _parts(_OR.sub(", ", text))
    return None if parts is None or len(parts) < 2 else Reading("list", tuple(read_answer(part) for part in parts))


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


def _interval(text: str) -> Reading | None:
    text = latex_of(text)
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        parts = _parts(text[1:-1])
        if parts is None or len(parts) != 2 or (parts[0] + parts[1]).count(text[0]) > 2:
            return None
        low, high = map(read_answer, parts)
        return Reading("interval", (low, text[0] == "[", high, text[-1] == "]"))
    found = _RELATION.split(text)
    signs = _RELATION.findall(text)
    if len(signs) not in (1, 2) or "=" in _RELATION.sub("", text):
        return None
    closed = [sign in (r"\le", r"\ge", "<=", ">=") for sign in signs]
    up = [sign in (r"\le", "<=", "<") for sign in signs]
    sides = [side.strip() for side in found]
    letters = [bool(re.fullmatch(r"\\?[A-Za-z]+", side)) and side != r"\infty" for side in sides]
    if len(signs) == 2 and letters == [False, True, False] and up[0] == up[1]:
        ends = (sides[0], closed[0], sides[2], closed[1]) if up[0] else (sides[2], closed[1], sides[0], closed[0])
    elif len(signs) == 1 and letters in ([True, False], [False, True]) and sides[0] and sides[1]:
        above = up[0] == letters[0]  # x < 3 and 3 > x end at 3
        number = sides[1] if letters[0] else sides[0]
        ends = (r"-\infty", False, number, closed[0]) if above else (number, closed[0], r"\infty", False)
    else:
        return None
    return Reading("interval", (read_answer(ends[0]), ends[1], read_answer(ends[2]), ends[3]))
