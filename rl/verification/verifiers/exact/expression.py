r"""Values of mathematical expressions, in a subset of LaTeX whose meaning is beyond doubt, and comparison by them.

An expression is evaluated at some points (numbers in place of its letters): exactly where it is rational there, with 60
digits elsewhere. Two are equal if they are at all points at which both are defined. No time is unbounded: what would
be too large is no expression that can be read.
"""

import functools
import hashlib
from fractions import Fraction
from typing import Any, NamedTuple

from mpmath.libmp import NoConvergence

from rl.verification.verifiers.exact.arithmetic import MP, Unclear, Undefined, near, number, over, times
from rl.verification.verifiers.exact.parser import Parser
from rl.verification.verifiers.exact.tokens import is_letter, tokens_of

_POINTS, _LEAST = 6, 3  # three points of fractions, one of them negative, and three of whole numbers


class Values(NamedTuple):
    """An expression at each point, None where it has no real value; a constant at one point."""

    points: tuple[Any, ...]
    decimals: bool  # some number was written with a decimal point
    logarithm: bool  # some logarithm has no base, which may be e or 10


@functools.lru_cache(maxsize=8192)
def evaluate(text: str, names: bool = True, base: int = 0) -> Values:
    r"""Return the values of an expression in LaTeX as `latex_of` gives it.

    Args:
        names: letters stand for themselves; False: the first letter of one text for the first of another.
        base: that of a logarithm that is written without one; 0: e.

    Raises:
        Unclear: it cannot be read.
    """
    tokens = tokens_of(text)
    order = {name: f"letter {place}" for place, name in enumerate(dict.fromkeys(filter(is_letter, tokens)))}
    variables = [name for name in order if name not in ("e", "i")]
    points = []
    for point in range(_POINTS if variables else 1):
        letter = functools.partial(_letter, point, {} if names else order)
        try:
            points.append(Parser(tokens, letter, base, real=bool(variables) and "i" not in tokens).value())
        except Undefined:
            points.append(None)
        except (ZeroDivisionError, OverflowError, ValueError, TypeError, NoConvergence) as error:
            if not variables:
                raise Unclear from error
            points.append(None)
    if sum(point is not None for point in points) < min(_LEAST, len(points)):
        raise Unclear
    return Values(tuple(points), any("." in token for token in tokens), "\\log" in tokens)


def same_values(one: Values, other: Values, digits: int) -> bool:
    """Return True if answer `one` and reference `other` agree where both are defined, decimals to `digits`."""
    count = max(len(one.points), len(other.points))
    points = [values.points * (count if len(values.points) == 1 else 1) for values in (one, other)]
    pairs = [(a, b) for a, b in zip(*points, strict=True) if a is not None and b is not None]
    decimals = one.decimals or other.decimals
    return len(pairs) >= min(_LEAST, count) and all(_same(a, b, digits, decimals) for a, b in pairs)


def proportional(given: tuple[str, str], wanted: tuple[str, str]) -> bool:
    """Return True if two equations, by their sides, are one but for a factor that is not 0."""
    try:
        one, other = (evaluate(f"({left})-({right})") for left, right in (given, wanted))
    except Unclear:
        return False
    if len(one.points) != len(other.points) or len(one.points) == 1:
        return False
    pairs = [(a, b) for a, b in zip(one.points, other.points, strict=True) if a is not None and b is not None]
    if len(pairs) < _LEAST or any(not a or not b for a, b in pairs):
        return False
    factor = over(*pairs[0])
    return all(near(a, times(factor, b)) for a, b in pairs)


def _same(one: Any, other: Any, digits: int, decimals: bool) -> bool:
    if near(one, other):
        return True
    one, other = number(one), number(other)
    if not decimals or abs(one - other) > min(abs(one), abs(other)) / 1000:
        return False
    unit = MP.mpf(10) ** digits
    return all(MP.nint(a * unit) == MP.nint(b * unit) for a, b in ((one.real, other.real), (one.imag, other.imag)))


def _letter(point: int, order: dict[str, str], name: str) -> Fraction:
    draw = int.from_bytes(hashlib.blake2b(f"{order.get(name, name)} {point}".encode(), digest_size=4).digest())
    if point >= _POINTS // 2:
        return Fraction(3 + 7 * (point - _POINTS // 2) + draw % 7)
    return Fraction(101 + draw % 887, 307) * (-1 if point == 1 else 1)
