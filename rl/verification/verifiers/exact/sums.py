r"""Sums of products of letters, pi and \sqrt{n} (n without a square factor) with rational coefficients.

A value has one such form, so two values are equal if and only if their forms are.
"""

import math
from fractions import Fraction

_MAX_TERMS, _MAX_ROOT = 64, 10**8

Product = tuple[int, tuple[tuple[str, int], ...]]  # square-free number under the root, powers of letters
Sum = dict[Product, Fraction]  # without zeros
Value = frozenset[tuple[Product, Fraction]]  # a sum that does not change any more
ONE: Product = (1, ())


class Unclear(Exception):
    """The text is not in the subset."""


def frozen(value: Sum) -> Value:
    """Return a sum as a value."""
    return frozenset(value.items())


def constant(value: Fraction) -> Sum:
    """Return a rational number as a sum."""
    return {ONE: value} if value else {}


def scaled(value: Sum, factor: int) -> Sum:
    """Return a sum times a whole number, which is not 0."""
    return {product: factor * part for product, part in value.items()}


def added(one: Sum, other: Sum) -> Sum:
    """Return the sum of two.

    Raises:
        Unclear: it has too many terms.
    """
    total = dict(one)
    for product, part in other.items():
        total[product] = total.get(product, Fraction(0)) + part
    return _without_zeros(total)


def times(one: Sum, other: Sum) -> Sum:
    """Return the product of two.

    Raises:
        Unclear: it has too many terms, or too large roots.
    """
    total: Sum = {}
    for (root, powers), part in one.items():
        for (other_root, other_powers), other_part in other.items():
            common = math.gcd(root, other_root)
            every = dict(powers)
            for name, power in other_powers:
                every[name] = every.get(name, 0) + power
            product = (root * other_root // common**2, tuple(sorted(every.items())))
            total[product] = total.get(product, Fraction(0)) + part * other_part * common
    return _without_zeros(total)


def _without_zeros(value: Sum) -> Sum:
    kept = {product: part for product, part in value.items() if part}
    if len(kept) > _MAX_TERMS or any(root > _MAX_ROOT for root, _ in kept):
        raise Unclear
    return kept


def inverse(value: Sum) -> Sum:
    r"""Return the inverse of a constant: of a fraction, or of one times \sqrt{n}.

    Raises:
        Unclear: it is another value.
    """
    if len(value) != 1:
        raise Unclear
    (((root, powers), part),) = value.items()
    if powers:
        raise Unclear
    return {(root, ()): 1 / (part * root)}


def root_of(value: Sum) -> Sum:
    """Return the square root of a rational number.

    Raises:
        Unclear: it is another value, negative, or too large.
    """
    if not value:
        return {}
    part = value.get(ONE)
    if len(value) != 1 or part is None or part < 0:
        raise Unclear
    inner, outer = part.numerator * part.denominator, 1
    if inner > _MAX_ROOT:
        raise Unclear
    factor = 2
    while factor * factor <= inner:
        while inner % (factor * factor) == 0:
            inner, outer = inner // (factor * factor), outer * factor
        factor += 1
    return {(inner, ()): Fraction(outer, part.denominator)}
