r"""Numbers as people write them: 1,234.5 and 1.234,50, -3/4, 1 1/2, 0.\overline{3}, 6.02e23, \frac{1}{2}, forty-two."""

import math
import re
from fractions import Fraction

_LONGEST, _MAX_POWER = 80, 400
_GROUPED = re.compile(r"\d{1,3}(?:(?:,|\{,\}|\\,|\\ | |')\d{3})+(?:\.\d+)?")  # 1,234.5
_EUROPEAN = re.compile(
    r"\d{1,3}(?:[. ]\d{3})+,\d{1,2}|\d{1,3}(?:\.\d{3}){2,}"
)  # 1.234,50 and 1.000.000, no other reading is left
_PLAIN = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)")
_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|dot|bar)\{(\d+)\}|\((\d+)\)|(\d)\5\5+(?:\.\.\.|…|\\l?dots))")
_SCIENCE = re.compile(r"(.+?)\s*(?:[eE]|(?:\\times|\\cdot|\*|×|·|(?<=[\d ])x)\s*10\s*\^\s*)\{?\s*([-+]?\d{1,4})\s*\}?")
_SLASH = re.compile(r"(\d+)\s*[/:]\s*(\d+)")
_FRAC = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
_MIXED = re.compile(r"(\d+)\s*(?:\s|\\,|\\ |(?=\\))\s*(.+)")
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_WORDS = {**{w: n for n, w in enumerate(_ONES)}, **{w: 10 * n for n, w in enumerate(_TENS, 2)}}
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}


def read_number(text: str) -> tuple[Fraction, bool] | None:
    """Return the value of a text that is a number and nothing else, and if it was written with decimals; else None."""
    text = text.strip()
    if not text or len(text) > _LONGEST:
        return None
    for word, sign in (("minus ", -1), ("negative ", -1), ("-", -1), ("+", 1)):
        if text.lower().startswith(word):
            found = _unsigned(text[len(word) :].strip())
            return found and (sign * found[0], found[1])
    return _unsigned(text)


def _unsigned(text: str) -> tuple[Fraction, bool] | None:
    if _PLAIN.fullmatch(text):
        return Fraction(text), "." in text
    if _GROUPED.fullmatch(text):
        return Fraction(re.sub(r"[^\d.]", "", text)), "." in text
    if _EUROPEAN.fullmatch(text):
        return Fraction(re.sub(r"[. ]", "", text).replace(",", ".")), True
    if (found := _REPEATING.fullmatch(text)) is not None:
        whole, fixed, again = found[1], found[2], found[3] or found[4] or found[5]
        part = Fraction(int(again), 10 ** len(again) - 1) / 10 ** len(fixed)
        return Fraction(f"{whole or 0}.{fixed or 0}") + part, False
    if (found := _SCIENCE.fullmatch(text)) is not None and abs(int(found[2])) <= _MAX_POWER:
        before = _unsigned(found[1].strip())
        return before and (before[0] * Fraction(10) ** int(found[2]), before[1])
    if (value := _fraction(text)) is not None:
        return value, False
    if text[-1:] in _VULGAR and text[:-1].strip().isdecimal():
        text = f"{text[:-1].strip()} {_VULGAR[text[-1]]}"
    if (found := _MIXED.fullmatch(text)) is not None and (part := _fraction(found[2])) is not None and 0 < part < 1:
        return int(found[1]) + part, False
    value = _in_words(text)
    return None if value is None else (Fraction(value), False)


def _fraction(text: str) -> Fraction | None:
    text = _VULGAR.get(text, text)
    if (found := _SLASH.fullmatch(text)) is not None:
        top, below = int(found[1]), int(found[2])
    elif (found := _FRAC.fullmatch(text)) is not None:
        top, below = int(found[1] or found[2]), int(found[3] or found[4])
    else:
        return None
    return Fraction(top, below) if below else None


def _in_words(text: str) -> int | None:
    """Return the value of forty-two, three hundred and five, or six times seven."""
    if " times " in text:
        factors = [_in_words(factor) for factor in text.split(" times ")]
        return None if None in factors else math.prod(factor or 0 for factor in factors)
    words = re.split(r"[\s-]+", text.lower().replace(" and ", " "))
    total = part = 0
    for word in words:
        if word in _WORDS:
            part += _WORDS[word]
        elif word == "hundred" and part:
            part *= 100
        elif word in ("thousand", "million") and part:
            total, part = total + part * (1000 if word == "thousand" else 10**6), 0
        else:
            return None
    return total + part
