"""Verdicts on two readings: equal, not equal or undecided, with the reason."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from rl.verification.verifiers.exact.reading import Reading

__all__ = ["Verdict", "close_numbers", "compare_readings"]

_RELATIVE = Fraction(1, 1000)  # decimals that round alike must agree in some three figures, too: 1e-7 is not 0
Undecided = Callable[[Reading, Reading], bool]


class Verdict(NamedTuple):
    """Decision on an answer, and its reason."""

    equal: bool
    reason: str


def compare_readings(given: Reading, wanted: Reading, expressions: Undecided, digits: int) -> Verdict:
    """Compare an answer with a reference.

    Args:
        given: the answer.
        wanted: the reference, whose kind decides what counts.
        expressions: compares two readings that are no plain values.
        digits: decimals that are compared.
    """

    def same(one: Reading, other: Reading) -> bool:
        return compare_readings(one, other, expressions, digits).equal

    if wanted.kind == "number" and given.kind == "number":
        return _numbers(given, wanted, digits)
    kinds = {given.kind, wanted.kind}
    if given.kind == wanted.kind and wanted.kind in ("choice", "word", "date"):
        return Verdict(given.value == wanted.value, f"{wanted.kind}s are compared as they are")
    if given.kind == wanted.kind == "time":
        half = {given.value[2], wanted.value[2]} - {""}
        return Verdict(given.value[:2] == wanted.value[:2] and len(half) < 2, "times are compared by hour and minute")
    if given.kind == wanted.kind and wanted.kind in ("matrix", "determinant", "cases"):
        shape = [list(map(len, one.value)) for one in (given, wanted)]
        pairs = zip(_cells(given), _cells(wanted), strict=False)
        return Verdict(shape[0] == shape[1] and all(same(a, b) for a, b in pairs), "matrices are compared by entries")
    if given.kind == wanted.kind == "interval":
        a, b = given.value, wanted.value
        ends = (a[1], a[3]) == (b[1], b[3]) and same(a[0], b[0]) and same(a[2], b[2])
        return Verdict(ends, "intervals are compared by their ends")
    if kinds <= {"list", "set"}:
        if any(_open_ended(one) for one in (given, wanted)):
            pairs = zip(given.value, wanted.value, strict=False)
            equal = len(given.value) == len(wanted.value) and all(same(a, b) for a, b in pairs)
            return Verdict(equal, "sequences are compared in order")
        return Verdict(_matched(given.value, wanted.value, same), "each value must be there once, in any order")
    if "expression" in kinds or kinds <= {"word", "choice"}:
        return Verdict(expressions(given, wanted), "compared as expressions")
    return Verdict(False, f"a {given.kind} is no {wanted.kind}")


def close_numbers(one: Fraction, other: Fraction, digits: int) -> bool:
    """Return True for decimals that round alike to so many digits, and agree in some three figures."""
    return round(one, digits) == round(other, digits) and abs(one - other) <= _RELATIVE * max(abs(one), abs(other))


def _numbers(given: Reading, wanted: Reading, digits: int) -> Verdict:
    """Compare two numbers. A percentage as reference equals its hundredth, too; a unit may be left out, not changed."""

    def equal(one: Fraction, other: Fraction) -> bool:
        decimals = given.decimals or wanted.decimals
        return one == other or (decimals and close_numbers(one, other, digits))

    if wanted.unit == "%" and given.unit in ("%", ""):
        hundredth = given.unit == "" and equal(given.value, wanted.value / 100)
        return Verdict(equal(given.value, wanted.value) or hundredth, "a percentage, or its hundredth")
    if given.unit == "%":
        return Verdict(equal(given.value / 100, wanted.value), "a percentage is its hundredth where none is asked for")
    if wanted.unit and given.unit and wanted.unit != given.unit:
        return Verdict(False, f"{given.unit} is not {wanted.unit}")
    return Verdict(equal(given.value, wanted.value), "numbers are compared by value")


def _cells(matrix: Reading) -> list[Reading]:
    return [cell for row in matrix.value for cell in row]


def _open_ended(one: Reading) -> bool:
    return any(part.kind == "expression" and ("dots" in part.value or "..." in part.value) for part in one.value)


def _matched(given: Sequence[Reading], wanted: Sequence[Reading], same: Callable[[Reading, Reading], bool]) -> bool:
    """Return True if each value on one side is the same as exactly one on the other."""
    left = list(wanted)
    for one in given:
        place = next((place for place, other in enumerate(left) if same(one, other)), None)
        if place is None:
            return False
        del left[place]
    return not left
