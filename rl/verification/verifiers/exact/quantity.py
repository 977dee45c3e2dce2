r"""Numbers with units: 10\text{ cm}, 42\%, $1.50, 20 euros, 90^\circ, 12 square inches, 1011_2."""

import re
from fractions import Fraction

from rl.verification.verifiers.exact.final_text import DOLLAR
from rl.verification.verifiers.exact.number import read_number

_LONGEST = 120
_CURRENCIES = "$ dollar usd;€ euro eur;£ pound gbp;¥ yen jpy;₹ rupee inr;₩ won krw;yuan cny rmb;cent"
_SIGNS = "$€£¥₹₩"
_NAMES = (
    "mm millimeter millimetre;cm centimeter centimetre;m meter metre;km kilometer kilometre;in inch inche;ft foot feet;"
    "mi mile;yd yard;g gram;kg kilogram;lb pound;s second sec;min minute;h hour hr;l liter litre;ml milliliter "
    "millilitre;mi/h mph;km/h kmh kph;degree deg;rad radian"
)
_MONEY, _UNITS = (
    {name: names.split()[0] for names in every.split(";") for name in names.split()} for every in (_CURRENCIES, _NAMES)
)
_KNOWN = {*_UNITS.values(), *_MONEY.values(), "per", "a", "squared", "cubed"}
_UNIT = re.compile(r"[A-Za-z]+(?:[ /*][A-Za-z]+)*(?:\s*(?:\^\{?-?\d\}?|squared|cubed))?")
_BEHIND = re.compile(
    r"(?P<number>.*?[\d}½⅓⅔¼¾])\s*(?:\\[,; ])?\s*(?P<unit>[A-Za-z][A-Za-z /^{}\d-]*|\\?%|\^\{?\\circ\}?.*)"
)
_PERCENT = re.compile(r"(?P<number>.*?)\s*(?:\\?%|percent|per cent)")
_BASED = re.compile(r"(\d+)_\{?(\d{1,2})\}?")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{([^{}]*)\}")
_TEXT_BEHIND = re.compile(r"(.*?)\s*(?:\\[,; ]\s*)?\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}((?:\^\{?\d\}?)?)")
_NO_UNITS = frozenset("pi sqrt sin cos tan cot sec csc log ln exp i e and or x y am pm if for where when".split())
_SHAPES = {"square": "^2", "sq": "^2", "cubic": "^3"}


def read_quantity(text: str) -> tuple[Fraction, str, bool] | None:
    """Return value, unit ("" for none) and if there were decimals, of a number with or without a unit; else None."""
    if len(text) > _LONGEST:
        return None
    text = text.replace(DOLLAR, "$").replace("\\$", "$").replace("\\left", "").replace("\\right", "")
    text = _TEXT.sub(r" \1", text).replace("°", "^\\circ").strip()
    if (found := _BASED.fullmatch(text)) is not None:
        return Fraction(found[1]), f"base {found[2]}", False
    unit = ""
    unsigned = text.lstrip("-")
    if (found := _PERCENT.fullmatch(text)) is not None:
        text, unit = found["number"], "%"
    elif text[:3].lower() in _MONEY and text[3:4] in (" ", "$"):
        unit, text = _MONEY[text[:3].lower()], text[3:].lstrip(" $")
    elif unsigned[:1] and unsigned[0] in _SIGNS:
        unit, text = unsigned[0], text.replace(unsigned[0], "", 1)
    if (value := read_number(text)) is not None:
        return value[0], unit, value[1]
    if not unit and (found := _BEHIND.fullmatch(text)) is not None:
        unit = _unit_of(found["unit"], apart=found.end("number") < found.start("unit"))
        value = read_number(found["number"]) if unit else None
    return None if value is None else (value[0], unit or "", value[1])


def split_unit(text: str) -> tuple[str, str]:
    r"""Return an expression without the unit behind it, and the unit: 12\pi and cm^2 of 12\pi\text{ cm}^2."""
    if (found := _TEXT_BEHIND.fullmatch(text)) is None or not found[1]:
        return text, ""
    unit = _unit_of(found[2].strip() + found[3], apart=True)
    return (text, "") if unit is None else (found[1].strip(), unit)


def _unit_of(text: str, *, apart: bool) -> str | None:
    """Return the unit that a text is, None for none; without a space before it, as in 2xy or 5m, few are."""
    text = text.strip().strip(".")
    if text[:1] in ("^", "%", "\\"):
        return "degree" if re.fullmatch(r"\^\{?\\circ\}?", text) else None
    words = re.split(r"[ /*]+", text)
    if _UNIT.fullmatch(text) is None or words[0].lower() in _NO_UNITS:
        return None
    known = [_one_unit(word).partition("^")[0] in _KNOWN for word in words if word not in _SHAPES]
    if not all(known) and (not apart or len(words[0]) < 3) or (not apart and len(words[0].partition("^")[0]) == 1):
        return None
    words = re.sub(r"\s*(?:per| a |/)\s*", "/", text.lower()).split("/")
    return "/".join(_one_unit(word.strip()) for word in words)


def _one_unit(word: str) -> str:
    shape, _, rest = word.partition(" ")
    if shape in _SHAPES and rest:
        return _one_unit(rest) + _SHAPES[shape]
    word = re.sub(r"\s*squared$", "^2", re.sub(r"\s*cubed$", "^3", word))
    word, power, exponent = word.partition("^")
    for name in (word, word.removesuffix("s")):
        if name in _UNITS or name in _MONEY:
            return (_UNITS.get(name) or _MONEY[name]) + power + exponent.strip("{}")
    return (word.removesuffix("s") if len(word) > 3 else word) + power + exponent.strip("{}")
