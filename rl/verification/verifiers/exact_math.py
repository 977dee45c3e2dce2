r"""Exact comparison of simple mathematics: a subset of LaTeX whose meaning is beyond doubt, hundreds of times faster.

Numbers, fractions, roots of numbers, pi, polynomials of a few letters, and tuples, intervals and sets of them. What is
read has one canonical form: a sum of products of letters, pi and \sqrt{n} (n without a square factor) with rational
coefficients, so two values are equal if and only if their forms are. All else is nothing that this module decides:
decimals that differ, units, percentages, words, two numbers side by side.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from fractions import Fraction

__all__ = ["same_value"]

_LETTERS = frozenset("nkpquvwxyz")  # the others are units, constants or functions somewhere
_MAX_TEXT, _MAX_TERMS, _MAX_POWER, _MAX_ROOT = 200, 64, 16, 10**8
_FAR = 1e-6  # relative; math-verify takes constants that are nearer than 1e-15 for equal
_TOKEN = re.compile(
    r"(?P<space>(?:\s|\\[,;!: ]|\\(?:left|right)(?![A-Za-z]))+)|(?P<number>\d{1,30}(?:\.\d{1,30})?|\.\d{1,30})"
    r"|(?P<command>\\(?:[dt]?frac|sqrt|pi|cdot|times|\{|\})(?![A-Za-z]))|(?P<letter>[a-z])|(?P<sign>[-+*/^(){}\[\],])"
)
_WRAPPED = re.compile(r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\(([^$]*)\\\)|\\\[([^$]*)\\\]", re.DOTALL)
_ELSEWHERE = re.compile(r"%|percent|pct|final\s+answer", re.IGNORECASE)  # changes what a box means
_OTHER = re.compile(r"[^A-Za-z\s.,:;!?'-]")  # beside an expression in dollars: numbers, signs
_WORD = re.compile(r"[A-Za-z]{3}")
_COMMAND = re.compile(r"\\[A-Za-z]+")

_Product = tuple[int, tuple[tuple[str, int], ...]]  # square-free number under the root, powers of letters
_Sum = dict[_Product, Fraction]  # without zeros
_ONE: _Product = (1, ())


@dataclasses.dataclass(frozen=True)
class _Known:
    """The meaning of a text: one value, or those between brackets. `decimals`: some were written with a point."""

    brackets: str  # "" or one of "()", "[]", "[)", "(]", "{}"
    values: tuple[frozenset[tuple[_Product, Fraction]], ...]
    decimals: bool


class _Unclear(Exception):
    """The text is not in the subset."""


def same_value(given: str, wanted: str, *, names: bool = True) -> bool | None:
    r"""Return True if two texts have the same value, False if not, None if this module cannot tell.

    Args:
        given: an answer; of a longer text its only `\boxed{...}` counts, or its only `$...$` where all else is words.
        wanted: the reference.
        names: letters stand for themselves; False: nothing is said of texts that have some.
    """
    first, second = _read(given), _read(wanted)
    if first is None or second is None:
        return None
    if not names and (_letters(first) or _letters(second)):
        return None
    if not first.brackets and not second.brackets:
        return _same_sums(first, second)
    return _same_lists(first, second)


def _same_sums(first: _Known, second: _Known) -> bool | None:
    (one,), (other,) = first.values, second.values
    if _bare(one) or _bare(other):
        return None
    if one == other:
        return True
    if first.decimals or second.decimals:
        return None
    return False if _letters(first) or _letters(second) or _far(one, other) else None


def _same_lists(first: _Known, second: _Known) -> bool | None:
    """Compare two lists of constants; of two in round or square brackets, those that are intervals are not empty."""
    if first.decimals or second.decimals or _letters(first) or _letters(second):
        return None
    if "" in (first.brackets, second.brackets) or (first.brackets == "{}") != (second.brackets == "{}"):
        return None
    if first.brackets == "{}":
        return _clearly(frozenset(first.values), frozenset(second.values), first, second)
    for one in (first, second):
        if len(one.values) == 2 and _number(one.values[0]) >= _number(one.values[1]):
            return None
        if len(one.values) != 2 and one.brackets != "()":
            return None
    return _clearly((first.brackets, first.values), (second.brackets, second.values), first, second)


def _clearly(one: object, other: object, first: _Known, second: _Known) -> bool | None:
    if one == other:
        return True
    values = sorted({_number(value) for known in (first, second) for value in known.values})
    distinct = len({value for known in (first, second) for value in known.values})
    apart = all(b - a > _FAR * max(1.0, abs(a), abs(b)) for a, b in zip(values, values[1:], strict=False))
    return False if apart and len(values) == distinct else None


def _far(one: frozenset[tuple[_Product, Fraction]], other: frozenset[tuple[_Product, Fraction]]) -> bool:
    first, second = _number(one), _number(other)
    return abs(first - second) > _FAR * max(abs(first), abs(second))


def _number(value: frozenset[tuple[_Product, Fraction]]) -> float:
    return math.fsum(
        float(part) * math.sqrt(root) * math.pi ** sum(power for _, power in powers)
        for (root, powers), part in sorted(value)
    )


def _letters(known: _Known) -> bool:
    return any(name != "pi" for value in known.values for (_, powers), _ in value for name, _ in powers)


def _bare(value: frozenset[tuple[_Product, Fraction]]) -> bool:
    """Return True for a letter or a product of some, which may be a word for math-verify."""
    return len(value) == 1 and all(
        part == 1 and root == 1 and any(name != "pi" for name, _ in powers) for (root, powers), part in value
    )


# ---- reading


@functools.lru_cache(maxsize=8192)
def _read(text: str) -> _Known | None:
    try:
        inner = _unwrapped(text.strip())
        if len(inner) > _MAX_TEXT:
            return None
        return _Parser(inner).known()
    except (_Unclear, OverflowError):
        return None


def _unwrapped(text: str) -> str:
    """Return what stands in dollars, brackets or a box: all of the text, or its only box.

    Raises:
        _Unclear: there is something beside it, or a word that is no mathematics.
    """
    boxes = text.count("\\boxed")
    if boxes == 1 and text.count("\\fbox") == 0:
        start = text.index("\\boxed") + len("\\boxed")
        if text[start : start + 1] != "{" or _ELSEWHERE.search(text):
            raise _Unclear
        end = _closing(text, start)
        if re.search(r"\$[^$]*\$\s*(?:,|,?\s*and|,?\s*or)?\s*$", text[:start]) and "$" in text[end:]:
            raise _Unclear
        return _unwrapped_once(text[start + 1 : end].strip())
    if boxes:
        raise _Unclear
    if text.count("$") == 2:  # words around the only mathematics
        before, inner, after = text.split("$")
        if before or after:
            if _OTHER.search(before + after) or _ELSEWHERE.search(text):
                raise _Unclear
            return inner.strip()
    inner = _unwrapped_once(text)
    if inner is text and _WORD.search(_COMMAND.sub("", text)):
        raise _Unclear
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
    raise _Unclear


def _tokens(text: str) -> Iterator[str]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise _Unclear
        place = found.end()
        if found.lastgroup != "space":
            yield found[0]


class _Parser:
    """Recursive descent; anything unexpected is unclear."""

    def __init__(self, text: str):
        self._tokens = [*_tokens(text), ""]
        self._place = 0
        self._decimals = False

    def known(self) -> _Known:
        """Read all of the text."""
        opening = self._peek()
        closings = {"(": ")]", "[": ")]", "\\{": ("\\}",)}.get(opening, ())
        if closings and (found := self._list(opening, closings)) is not None:
            return found
        self._place = 0
        value = self._sum()
        self._expect("")
        return _Known("", (_frozen(value),), self._decimals)

    def _list(self, opening: str, closings: str | tuple[str, ...]) -> _Known | None:
        """Read a list of values between brackets, or return None: it is a value that begins with a bracket."""
        self._take()
        values = [_frozen(self._sum())]
        while self._peek() == ",":
            self._take()
            token = self._peek()
            values.append(_frozen(self._sum()))
            if len(token) == 3 and token.isdigit():
                raise _Unclear  # (1,234): two numbers or one?
        closing = self._take()
        if opening != "\\{" and len(values) == 1:
            return None
        if not closing or closing not in closings or self._take() != "":
            raise _Unclear
        return _Known("{}" if opening == "\\{" else opening + closing, tuple(values), self._decimals)

    def _sum(self) -> _Sum:
        negative = self._peek() == "-"
        if self._peek() in ("-", "+"):
            self._take()
        total = _scaled(self._product(), -1 if negative else 1)
        while self._peek() in ("+", "-"):
            sign = -1 if self._take() == "-" else 1
            total = _added(total, _scaled(self._product(), sign))
        return total

    def _product(self) -> _Sum:
        before, value = self._peek(), self._power()
        divided = False
        while True:
            token = self._peek()
            if token in ("*", "\\cdot", "\\times"):
                self._take()
                before, value = self._peek(), _times(value, self._power())
            elif token == "/":
                self._take()
                before, value, divided = self._peek(), _times(value, _inverse(self._power())), True
            elif not divided and _adjoins(before, token):
                before, value = token, _times(value, self._power())
            else:
                return value

    def _power(self) -> _Sum:
        base = self._base()
        if self._peek() != "^":
            return base
        self._take()
        power = self._exponent()
        if self._peek() == "^":
            raise _Unclear
        base = base if power >= 0 else _inverse(base)
        value: _Sum = {_ONE: Fraction(1)}
        for _ in range(abs(power)):
            value = _times(value, base)
        return value

    def _exponent(self) -> int:
        if (braced := self._peek() == "{") is True:
            self._take()
        negative = braced and self._peek() == "-"
        if negative:
            self._take()
        token = self._take()
        if not token.isdigit() or int(token) > _MAX_POWER or (len(token) > 1 and not braced):
            raise _Unclear
        if braced:
            self._expect("}")
        return -int(token) if negative else int(token)

    def _base(self) -> _Sum:
        token = self._take()
        if token[:1].isdigit() or token[:1] == ".":
            self._decimals |= "." in token
            return _constant(Fraction(token))
        if token in _LETTERS:
            return {(1, ((token, 1),)): Fraction(1)}
        if token == "\\pi":
            return {(1, (("pi", 1),)): Fraction(1)}
        if token.endswith("frac"):
            top = self._braced()
            return _times(top, _inverse(self._braced()))
        if token == "\\sqrt":
            return _root(self._braced())
        if token == "(":
            value = self._sum()
            self._expect(")")
            return value
        raise _Unclear

    def _braced(self) -> _Sum:
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
            raise _Unclear


def _adjoins(before: str, token: str) -> bool:
    r"""Return True if two factors may stand side by side: 2x, 2\sqrt{3}, xy, (x+1)(x-1); not 2 3, 1\frac12, f(x)."""
    if token in _LETTERS or token in ("\\sqrt", "\\pi"):
        return True
    return token == "(" and before not in _LETTERS


# ---- sums


def _frozen(value: _Sum) -> frozenset[tuple[_Product, Fraction]]:
    return frozenset(value.items())


def _constant(value: Fraction) -> _Sum:
    return {_ONE: value} if value else {}


def _scaled(value: _Sum, factor: int) -> _Sum:
    return {product: factor * part for product, part in value.items()}


def _added(one: _Sum, other: _Sum) -> _Sum:
    total = dict(one)
    for product, part in other.items():
        total[product] = total.get(product, Fraction(0)) + part
    return _without_zeros(total)


def _times(one: _Sum, other: _Sum) -> _Sum:
    total: _Sum = {}
    for (root, powers), part in one.items():
        for (other_root, other_powers), other_part in other.items():
            common = math.gcd(root, other_root)
            every = dict(powers)
            for name, power in other_powers:
                every[name] = every.get(name, 0) + power
            product = (root * other_root // common**2, tuple(sorted(every.items())))
            total[product] = total.get(product, Fraction(0)) + part * other_part * common
    return _without_zeros(total)


def _without_zeros(value: _Sum) -> _Sum:
    kept = {product: part for product, part in value.items() if part}
    if len(kept) > _MAX_TERMS or any(root > _MAX_ROOT for root, _ in kept):
        raise _Unclear
    return kept


def _inverse(value: _Sum) -> _Sum:
    r"""Return the inverse of a constant: of a fraction, or of one times \sqrt{n}."""
    if len(value) != 1:
        raise _Unclear
    (((root, powers), part),) = value.items()
    if powers:
        raise _Unclear
    return {(root, ()): 1 / (part * root)}


def _root(value: _Sum) -> _Sum:
    if not value:
        return {}
    part = value.get(_ONE)
    if len(value) != 1 or part is None or part < 0:
        raise _Unclear
    inner, outer = part.numerator * part.denominator, 1
    if inner > _MAX_ROOT:
        raise _Unclear
    factor = 2
    while factor * factor <= inner:
        while inner % (factor * factor) == 0:
            inner, outer = inner // (factor * factor), outer * factor
        factor += 1
    return {(inner, ()): Fraction(outer, part.denominator)}
