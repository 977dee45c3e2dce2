r"""Reading of simple mathematics: a subset of LaTeX whose meaning is beyond doubt.

Numbers, fractions, roots of numbers, pi, polynomials of a few letters, and tuples, intervals and sets of them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from fractions import Fraction

from rl.verification.verifiers.exact.sums import (
    ONE,
    Sum,
    Unclear,
    Value,
    added,
    constant,
    frozen,
    inverse,
    root_of,
    scaled,
    times,
)

_LETTERS = frozenset("nkpquvwxyz")  # the others are units, constants or functions somewhere
_MAX_TEXT, _MAX_POWER = 200, 16
_MAX_NUMBER_POWER, _MAX_FACTORIAL, _MAX_BITS = 3_000, 3_000, 40_000  # of plain numbers
_TOKEN = re.compile(
    r"(?P<space>(?:\s|\\[,;!: ]|\\(?:left|right)(?![A-Za-z]))+)|(?P<number>\d{1,30}(?:\.\d{1,30})?|\.\d{1,30})"
    r"|(?P<command>\\(?:[dt]?frac|sqrt|pi|cdot|times|\{|\})(?![A-Za-z]))|(?P<letter>[a-z])|(?P<sign>[-+*/^(){}\[\],!])"
)
_WRAPPED = re.compile(r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\(([^$]*)\\\)|\\\[([^$]*)\\\]", re.DOTALL)
_ELSEWHERE = re.compile(r"%|percent|pct|final\s+answer", re.IGNORECASE)  # changes what a box means
_OTHER = re.compile(r"[^A-Za-z\s.,:;!?'-]")  # beside an expression in dollars: numbers, signs
_WORD = re.compile(r"[A-Za-z]{3}")
_COMMAND = re.compile(r"\\[A-Za-z]+")


@dataclasses.dataclass(frozen=True)
class Known:
    """The meaning of a text: one value, or those between brackets. `decimals`: some were written with a point."""

    brackets: str  # "" or one of "()", "[]", "[)", "(]", "{}"
    values: tuple[Value, ...]
    decimals: bool

    @property
    def has_letters(self) -> bool:
        """True where a value depends on a letter."""
        return any(name != "pi" for value in self.values for (_, powers), _ in value for name, _ in powers)


@functools.lru_cache(maxsize=8192)
def read(text: str) -> Known | None:
    """Return the meaning of a text; None: it is not in the subset, or too long."""
    try:
        inner = _unwrapped(text.strip())
        if len(inner) > _MAX_TEXT:
            return None
        return _Parser(inner).known()
    except (Unclear, OverflowError):
        return None


def _unwrapped(text: str) -> str:
    """Return what stands in dollars, brackets or a box: all of the text, or its only box.

    Raises:
        Unclear: there is something beside it, or a word that is no mathematics.
    """
    boxes = text.count("\\boxed")
    if boxes == 1 and text.count("\\fbox") == 0:
        start = text.index("\\boxed") + len("\\boxed")
        if text[start : start + 1] != "{" or _ELSEWHERE.search(text):
            raise Unclear
        end = _closing(text, start)
        if re.search(r"\$[^$]*\$\s*(?:,|,?\s*and|,?\s*or)?\s*$", text[:start]) and "$" in text[end:]:
            raise Unclear
        return _unwrapped_once(text[start + 1 : end].strip())
    if boxes:
        raise Unclear
    if text.count("$") == 2:  # words around the only mathematics
        before, inner, after = text.split("$")
        if before or after:
            if _OTHER.search(before + after) or _ELSEWHERE.search(text):
                raise Unclear
            return inner.strip()
    inner = _unwrapped_once(text)
    if inner is text and _WORD.search(_COMMAND.sub("", text)):
        raise Unclear
    return inner


def _unwrapped_once(text: str) -> str:
    if (found := _WRAPPED.fullmatch(text)) is None:
        return text
    return next(group for group in found.groups() if group is not None).strip()


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
    raise Unclear


def _tokens(text: str) -> Iterator[str]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise Unclear
        place = found.end()
        if found.lastgroup != "space":
            yield found[0]


class _Parser:
    """Recursive descent; anything unexpected is unclear."""

    def __init__(self, text: str):
        self._tokens = [*_tokens(text), ""]
        self._place = 0
        self._decimals = False

    def known(self) -> Known:
        """Read all of the text."""
        opening = self._peek()
        closings = {"(": ")]", "[": ")]", "\\{": ("\\}",)}.get(opening, ())
        if closings and (found := self._list(opening, closings)) is not None:
            return found
        self._place = 0
        value = self._sum()
        self._expect("")
        return Known("", (frozen(value),), self._decimals)

    def _list(self, opening: str, closings: str | tuple[str, ...]) -> Known | None:
        """Read a list of values between brackets, or return None: it is a value that begins with a bracket."""
        self._take()
        values = [frozen(self._sum())]
        while self._peek() == ",":
            self._take()
            token = self._peek()
            values.append(frozen(self._sum()))
            if len(token) == 3 and token.isdigit():
                raise Unclear  # (1,234): two numbers or one?
        closing = self._take()
        if opening != "\\{" and len(values) == 1:
            return None
        if not closing or closing not in closings or self._take() != "":
            raise Unclear
        return Known("{}" if opening == "\\{" else opening + closing, tuple(values), self._decimals)

    def _sum(self) -> Sum:
        negative = self._peek() == "-"
        if self._peek() in ("-", "+"):
            self._take()
        total = scaled(self._product(), -1 if negative else 1)
        while self._peek() in ("+", "-"):
            sign = -1 if self._take() == "-" else 1
            total = added(total, scaled(self._product(), sign))
        return total

    def _product(self) -> Sum:
        before, value = self._peek(), self._power()
        divided = False
        while True:
            token = self._peek()
            if token in ("*", "\\cdot", "\\times"):
                self._take()
                before, value = self._peek(), times(value, self._power())
            elif token == "/":
                self._take()
                before, value, divided = self._peek(), times(value, inverse(self._power())), True
            elif not divided and _adjoins(before, token):
                before, value = token, times(value, self._power())
            else:
                return value

    def _power(self) -> Sum:
        base = self._base()
        if self._peek() == "!":
            base = self._factorial(base)
        if self._peek() != "^":
            return base
        self._take()
        power = self._exponent()
        if self._peek() in ("^", "!"):
            raise Unclear
        if set(base) == {ONE}:
            return constant(_number_power(base[ONE], power))
        if abs(power) > _MAX_POWER:
            raise Unclear
        base = base if power >= 0 else inverse(base)
        value: Sum = {ONE: Fraction(1)}
        for _ in range(abs(power)):
            value = times(value, base)
        return value

    def _factorial(self, base: Sum) -> Sum:
        self._take()
        number = base.get(ONE, Fraction(0)) if set(base) <= {ONE} else None
        if number is None or number.denominator != 1 or not 0 <= number <= _MAX_FACTORIAL or self._peek() == "!":
            raise Unclear
        return constant(Fraction(math.factorial(int(number))))

    def _exponent(self) -> int:
        if (braced := self._peek() == "{") is True:
            self._take()
        negative = braced and self._peek() == "-"
        if negative:
            self._take()
        token = self._take()
        if not token.isdigit() or int(token) > _MAX_NUMBER_POWER or (len(token) > 1 and not braced):
            raise Unclear
        if braced:
            self._expect("}")
        return -int(token) if negative else int(token)

    def _base(self) -> Sum:
        token = self._take()
        if token[:1].isdigit() or token[:1] == ".":
            self._decimals |= "." in token
            return constant(Fraction(token))
        if token in _LETTERS:
            return {(1, ((token, 1),)): Fraction(1)}
        if token == "\\pi":
            return {(1, (("pi", 1),)): Fraction(1)}
        if token.endswith("frac"):
            top = self._braced()
            return times(top, inverse(self._braced()))
        if token == "\\sqrt":
            return root_of(self._braced())
        if token == "(":
            value = self._sum()
            self._expect(")")
            return value
        raise Unclear

    def _braced(self) -> Sum:
        self._expect("{")
        value = self._sum()
        self._expect("}")
        return value

    def _peek(self) -> str:
        return self._tokens[self._place]

    def _take(self) -> str:
        token = self._tokens[self._place]
        self._place = min(self._place + 1, len(self._tokens) - 1)
        return token

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise Unclear


def _number_power(base: Fraction, power: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(power) > _MAX_BITS or (power < 0 and not base):
        raise Unclear
    return base**power


def _adjoins(before: str, token: str) -> bool:
    r"""Return True if two factors may stand side by side: 2x, 2\sqrt{3}, xy, (x+1)(x-1); not 2 3, 1\frac12, f(x)."""
    if token in _LETTERS or token in ("\\sqrt", "\\pi"):
        return True
    return token == "(" and before not in _LETTERS
