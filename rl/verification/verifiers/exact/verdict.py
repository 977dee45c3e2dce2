"""Verdicts on two readings: equal or not, with the reason."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from rl.verification.verifiers.exact.arithmetic import Unclear
from rl.verification.verifiers.exact.expression import Values, evaluate, proportional, same_values
from rl.verification.verifiers.exact.reading import Reading, read_answer

_COMMAND, _LETTER = re.compile(r"\\[A-Za-z]+"), re.compile(r"[A-Za-z]")
_OPERATION = re.compile(r"[-+*/^]|\d")
_TO_SOLVE = re.compile(r"\d\s*[a-z]|[a-z]\s*[-+]\s*\d")  # 2x = 6 and x + 1 = 6 are no answer yet
_PROSE, _LONGEST_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z][a-z]{2,}"), 80
_DOTS = ("dots", "...", "…")
Same = Callable[[Reading, Reading], bool]


class Verdict(NamedTuple):
    """Decision on an answer, and its reason."""

    equal: bool
    reason: str


class MathRules(NamedTuple):
    """Settings of a comparison: the decimals that count; strict: names of letters and the kind of brackets count."""

    digits: int = 6
    strict: bool = True


def compare_readings(given: Reading, wanted: Reading, rules: MathRules) -> Verdict:
    """Compare an answer with a reference, whose kind decides what counts."""

    def same(one: Reading, other: Reading) -> bool:
        return compare_readings(one, other, rules).equal

    given, wanted = _as_point(given, wanted), _as_point(wanted, given)
    if not rules.strict and {given.kind, wanted.kind} <= {"interval", "tuple", "set", "list"}:
        given, wanted = _as_set(given), _as_set(wanted)
    kinds = {given.kind, wanted.kind}
    if kinds <= {"number", "expression"}:
        return _values(given, wanted, rules)
    if kinds == {"word", "expression"}:
        return _values(given._replace(value=given.text), wanted._replace(value=wanted.text), rules)
    if "equation" in kinds:
        return Verdict(_equations(given, wanted, same), "equations are compared by their sides")
    if "choice" in kinds:
        return Verdict(_choices(given, wanted, same), "choices are compared by letter, or by what stands behind it")
    if kinds == {"union"} or kinds <= {"list", "set"}:
        return Verdict(*_lists(given, wanted, same))
    if given.kind == wanted.kind:
        return Verdict(*_of_one_kind(given, wanted, same))
    return Verdict(False, f"{'an' if given.kind[0] in 'aeiou' else 'a'} {given.kind} is no {wanted.kind}")


def _of_one_kind(given: Reading, wanted: Reading, same: Same) -> tuple[bool, str]:
    kind, a, b = wanted.kind, given.value, wanted.value
    if kind == "time":
        return a[:2] == b[:2] and len({a[2], b[2]} - {""}) < 2, "times are compared by hour and minute"
    if kind in ("matrix", "determinant", "cases"):
        shapes = [list(map(len, rows)) for rows in (a, b)]
        cells = [[cell for row in rows for cell in row] for rows in (a, b)]
        return shapes[0] == shapes[1] and _in_order(cells[0], cells[1], same), "matrices are compared by entries"
    if kind in ("interval", "relation"):
        ends = (a[1], a[3]) == (b[1], b[3]) and same(a[0], b[0]) and same(a[2], b[2])
        return ends, f"{kind}s are compared by their ends"
    if kind == "tuple":
        return _in_order(a, b, same), "points are compared in order"
    return a == b, f"{kind}s are compared as they are"


def unreadable(one: Reading) -> bool:
    """Return True for what can be no reference: brackets that are not closed, or prose."""
    if one.kind == "word":
        return len(one.value) > _LONGEST_WORDS
    if one.kind == "expression":
        try:
            evaluate(one.value)
            return False
        except Unclear:
            opened, closed = (sum(map(one.value.count, signs)) for signs in ("([{", ")]}"))
            return not one.value or opened != closed or len(_PROSE.findall(one.value)) > 2
    parts = one.value if isinstance(one.value, tuple) else ()
    rows = [part if isinstance(part, tuple) and not isinstance(part, Reading) else (part,) for part in parts]
    return any(unreadable(cell) for row in rows for cell in row if isinstance(cell, Reading))


def _values(given: Reading, wanted: Reading, rules: MathRules) -> Verdict:
    """Compare numbers and expressions. A percentage equals its hundredth; a unit may be left out, not changed."""
    if wanted.unit == "%" and given.unit in ("%", ""):
        hundredth = wanted._replace(value=wanted.value / 100, unit="")
        equal = _equal(given, wanted, rules) or (not given.unit and _equal(given, hundredth, rules))
        return Verdict(equal, "a percentage, or its hundredth")
    if given.unit == "%":
        equal = _equal(given._replace(value=given.value / 100, unit=""), wanted, rules)
        return Verdict(equal, "a percentage is its hundredth where none is asked for")
    if wanted.unit and given.unit and wanted.unit != given.unit:
        return Verdict(False, f"{given.unit} is not {wanted.unit}")
    reason = "numbers are compared by value" if wanted.kind == given.kind == "number" else "compared as expressions"
    return Verdict(_equal(given, wanted, rules), reason)


def _equal(given: Reading, wanted: Reading, rules: MathRules) -> bool:
    if isinstance(given.value, str) and isinstance(wanted.value, str) and _plain(given.value) == _plain(wanted.value):
        return True
    try:
        for base in (0, 10):  # bases tried for a logarithm without one
            one, other = (_evaluated(side, rules, base) for side in (given, wanted))
            if same_values(one, other, rules.digits):
                return True
            if not (one.logarithm or other.logarithm):
                return False
    except Unclear:
        pass
    return False


def _evaluated(one: Reading, rules: MathRules, base: int) -> Values:
    if isinstance(one.value, Fraction):
        return Values((one.value,), one.decimals, False)
    return evaluate(one.value, rules.strict, base)


def _equations(given: Reading, wanted: Reading, same: Same) -> bool:
    """Compare equations: y = 2x+1 is 2x+1, and 2x-y+1 = 0; 2+3 = 5 is 5, while in 6 = 5 a side is wrong."""
    if given.kind == wanted.kind:
        names = [one.value[0] for one in (given, wanted)]
        if _plain(names[0]) == _plain(names[1]) and not _OPERATION.search(names[0]):
            return same(read_answer(given.value[-1]), read_answer(wanted.value[-1]))
        if list(map(_plain, given.value)) == list(map(_plain, wanted.value)):
            return True
        solved = not _OPERATION.search(names[1]) and not _has_letters(wanted.value[-1])  # x = 3 asks for x
        return not solved and proportional(*((one.value[0], one.value[-1]) for one in (given, wanted)))
    said, other = (_said(given), wanted) if given.kind == "equation" else (_said(wanted), given)
    return bool(said) and all(same(read_answer(side), other) for side in said)


def _said(equation: Reading) -> list[str]:
    """Return the sides that are what an equation says: the last, and all without letters; none of 2x = 6."""
    sides = equation.value
    if _TO_SOLVE.search(_COMMAND.sub("", sides[0])) or (sides[-1] == "0" and _OPERATION.search(sides[0])):
        return []
    if not _has_letters(sides[0]) and re.fullmatch(r"[A-Za-z]", sides[-1]):
        sides = sides[:-1]  # 5 = x
    return [*(side for side in sides[:-1] if not _has_letters(side)), sides[-1]]


def _choices(given: Reading, wanted: Reading, same: Same) -> bool:
    if given.kind == wanted.kind:
        return given.value[0] == wanted.value[0]
    chosen, other = (given, wanted) if given.kind == "choice" else (wanted, given)
    if len(other.text) == 1:
        return other.text.upper() == chosen.value[0]
    return len(chosen.value) > 1 and same(chosen.value[1], other)


def _lists(given: Reading, wanted: Reading, same: Same) -> tuple[bool, str]:
    parts, others = given.value, wanted.value
    if any(dots in part.text for part in (*parts, *others) for dots in _DOTS):
        return _in_order(parts, others, same), "sequences are compared in order"
    if "set" in (given.kind, wanted.kind):
        equal = all(any(same(a, b) for b in others) for a in parts) and all(
            any(same(a, b) for a in parts) for b in others
        )
        return equal, "each value must be there, in any order"
    left = list(others)
    for one in parts:
        place = next((place for place, other in enumerate(left) if same(one, other)), None)
        if place is None:
            return False, "each value must be there once, in any order"
        del left[place]
    return not left, "each value must be there once, in any order"


def _in_order(given: Sequence[Reading], wanted: Sequence[Reading], same: Same) -> bool:
    return len(given) == len(wanted) and all(same(a, b) for a, b in zip(given, wanted, strict=True))


def _as_point(one: Reading, other: Reading) -> Reading:
    """Return x = 2, y = 3 as (2, 3) where it is compared with a point."""
    if (
        one.kind != "list"
        or other.kind not in ("tuple", "interval")
        or any(part.kind != "equation" for part in one.value)
    ):
        return one
    names, values = [part.value[0] for part in one.value], [read_answer(part.value[-1]) for part in one.value]
    if sorted(set(names)) != names or not all(re.fullmatch("[a-z]", name) for name in names):
        return one
    if other.kind == "tuple":
        return one._replace(kind="tuple", value=tuple(values))
    return one._replace(kind="interval", value=(values[0], False, values[1], False)) if len(values) == 2 else one


def _as_set(one: Reading) -> Reading:
    values = tuple(part for part in one.value if isinstance(part, Reading))
    return one._replace(kind="set", value=values)


def _plain(text: str) -> str:
    return "".join(text.split())


def _has_letters(text: str) -> bool:
    return bool(_LETTER.search(_COMMAND.sub("", text)))
