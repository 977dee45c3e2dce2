r"""Exact comparison of simple mathematics: a subset of LaTeX whose meaning is beyond doubt.

About 200 times as fast as math-verify (`axl bench verify`), with its verdicts.

What `latex` reads has one canonical form (see `sums`). All else is nothing that this module decides: decimals that
differ, units, percentages, words, two numbers side by side.
"""

import math

from rl.verification.verifiers.exact.latex import Known, read
from rl.verification.verifiers.exact.sums import ONE, Value

_FAR = 1e-6  # relative; math-verify takes constants that are nearer than 1e-15 for equal


def same_value(given: str, wanted: str, *, names: bool = True) -> bool | None:
    r"""Return True if two texts have the same value, False if not, None if this module cannot tell.

    Args:
        given: an answer; of a longer text its only `\boxed{...}` counts, or its only `$...$` where all else is words.
        wanted: the reference.
        names: letters stand for themselves; False: nothing is said of texts that have some.
    """
    first, second = read(given), read(wanted)
    if first is None or second is None:
        return None
    if not names and (first.has_letters or second.has_letters):
        return None
    if not first.brackets and not second.brackets:
        return _same_sums(first, second)
    return _same_lists(first, second)


def _same_sums(first: Known, second: Known) -> bool | None:
    (one,), (other,) = first.values, second.values
    if _bare(one) or _bare(other):
        return None
    if one == other:
        return True
    if first.decimals or second.decimals:
        return None
    rational = all(set(dict(value)) <= {ONE} for value in (one, other))  # exact, however small the difference is
    return False if rational or first.has_letters or second.has_letters or _far(one, other) else None


def _same_lists(first: Known, second: Known) -> bool | None:
    """Compare two lists of constants; of two in round or square brackets, those that are intervals are not empty."""
    if first.decimals or second.decimals or first.has_letters or second.has_letters:
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


def _clearly(one: object, other: object, first: Known, second: Known) -> bool | None:
    if one == other:
        return True
    values = sorted({_number(value) for known in (first, second) for value in known.values})
    distinct = len({value for known in (first, second) for value in known.values})
    apart = all(b - a > _FAR * max(1.0, abs(a), abs(b)) for a, b in zip(values, values[1:], strict=False))
    return False if apart and len(values) == distinct else None


def _far(one: Value, other: Value) -> bool:
    first, second = _number(one), _number(other)
    return abs(first - second) > _FAR * max(abs(first), abs(second))


def _number(value: Value) -> float:
    return math.fsum(
        float(part) * math.sqrt(root) * math.pi ** sum(power for _, power in powers)
        for (root, powers), part in sorted(value)
    )


def _bare(value: Value) -> bool:
    """Return True for a letter or a product of some, which may be a word for math-verify."""
    return len(value) == 1 and all(
        part == 1 and root == 1 and any(name != "pi" for name, _ in powers) for (root, powers), part in value
    )
