r"""Arithmetic with numbers that are fractions as long as they can be, and have 60 digits from then on.

Nothing takes unbounded time or memory: numbers that would be too large are unclear.
"""

import math
from fractions import Fraction
from typing import Any

import mpmath

Number = Any  # a Fraction, or mpmath's mpf or mpc: it has no types
MP: Any = mpmath.mp.clone()
MP.dps = 60
MAX_SIZE = 10**6
_NEAR = MP.mpf(10) ** -40  # relative; the other digits are for cancellation
_ZERO = MP.mpf(10) ** -50
_MAX_BITS, _MAX_FACTORIAL, _MAX_DEGREE = 40_000, 3_000, 100


class Unclear(Exception):
    """The text is no expression of the subset, or too large."""


class Undefined(Exception):
    """The expression has no real value at a point."""


def number(value: Number) -> Number:
    """Return a value with 60 digits."""
    return MP.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def near(one: Number, other: Number) -> bool:
    """Return True for two values that are equal: exactly, or where one is not exact, to 40 digits."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = number(one), number(other)
    size = max(abs(one), abs(other))
    return abs(one - other) <= _NEAR * size or (0 in (one, other) and size < _ZERO)


def add(one: Number, other: Number) -> Number:
    """Return the sum."""
    return _bounded(one + other) if _exact(one, other) else number(one) + number(other)


def times(one: Number, other: Number) -> Number:
    """Return the product."""
    return _bounded(one * other) if _exact(one, other) else number(one) * number(other)


def over(one: Number, other: Number) -> Number:
    """Return the quotient; ZeroDivisionError by 0."""
    return _bounded(one / other) if _exact(one, other) else number(one) / number(other)


def power(value: Number, exponent: Number, *, real: bool) -> Number:
    """Return a power.

    Args:
        real: only real values count.

    Raises:
        Unclear: it is too large.
        Undefined: it is not real.
    """
    if _exact(value, exponent) and exponent.denominator == 1:
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        if bits * abs(exponent) > _MAX_BITS:
            raise Unclear
        return value ** int(exponent)
    value, exponent = number(value), number(exponent)
    if not value or abs(exponent) > MAX_SIZE or abs(MP.log(abs(value)) * exponent) > MAX_SIZE:
        raise Unclear
    if real and value.real < 0 and exponent != int(exponent):
        raise Undefined
    return value**exponent


def root(value: Number, degree: Number, *, real: bool) -> Number:
    """Return a root of a whole degree, of negative numbers the real one where there is one; see `power`."""
    if degree not in range(2, _MAX_DEGREE):
        raise Unclear
    degree = int(degree)
    if isinstance(value, Fraction) and value > 0:
        parts = [_whole_root(one, degree) for one in (value.numerator, value.denominator)]
        if parts[0] is not None and parts[1] is not None:
            return Fraction(parts[0], parts[1])
    value = number(value)
    if value.imag == 0 and value.real < 0:
        if degree % 2:
            return -MP.root(-value.real, degree)
        if real:
            raise Undefined
    return MP.root(value, degree)


def factorial(value: Number) -> Fraction:
    """Return the factorial of a whole number; see `whole`."""
    return Fraction(math.factorial(whole(value, _MAX_FACTORIAL)))


def whole(value: Number, most: int) -> int:
    """Return a value as a whole number (Unclear: above `most`; Undefined: negative, or not whole)."""
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise Undefined
    if value > most:
        raise Unclear
    return int(value)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise Unclear
    return value


def _exact(one: Number, other: Number) -> bool:
    return isinstance(one, Fraction) and isinstance(other, Fraction)


def _whole_root(value: int, degree: int) -> int | None:
    found = math.isqrt(value) if degree == 2 else int(MP.nint(MP.root(value, degree)))
    return found if found**degree == value else None
