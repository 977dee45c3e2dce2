"""The check of what a scorer returned: a finite number, alone or with named terms. Nothing else is a reward."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["MAX_TERMS", "NotAReward", "check_rewards", "check_terms"]

MAX_TERMS = 32
_LONGEST_NAME = 64


class NotAReward(TypeError):
    """A scorer returned something that is no finite number."""


def check_rewards(values: Any, count: int) -> list[tuple[float, dict[str, float]]]:
    """Return (reward, terms) of each of the `count` answers that a scorer was given.

    Raises:
        NotAReward: another number of values, or one that is neither a finite number nor terms with a "reward".
    """
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes):
        raise NotAReward(f"the scorer returned {describe(values)} for {count} answers; expected a list of numbers")
    if len(values) != count:
        raise NotAReward(f"the scorer returned {len(values)} values for {count} answers")
    return [_reward(value) for value in values]


def check_terms(terms: Mapping[Any, Any]) -> dict[str, float]:
    """Return named terms as floats.

    Raises:
        NotAReward: a name is not short text, a value is not a finite number, or there are too many.
    """
    if len(terms) > MAX_TERMS:
        raise NotAReward(f"{len(terms)} terms; expected {MAX_TERMS} at most")
    for name in terms:
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise NotAReward(f"a term is named {describe(name)}; expected a text of 1 to {_LONGEST_NAME} characters")
    return {name: number(value, f"term {name!r}") for name, value in terms.items()}


def number(value: Any, what: str = "the scorer") -> float:
    """Return a finite number as a float; booleans are 0 and 1, and text is none.

    Raises:
        NotAReward: it is something else.
    """
    if not isinstance(value, numbers.Real | np.bool_):
        raise NotAReward(f"{what} returned {describe(value)}; expected a finite number")
    found = float(value)
    if not math.isfinite(found):
        raise NotAReward(f"{what} returned {found}; expected a finite number")
    return found


def describe(value: Any) -> str:
    """Return a short text of a value for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _reward(value: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(value, Mapping):
        return number(value), {}
    terms = check_terms(value)
    if "reward" not in terms:
        raise NotAReward(f"terms {sorted(terms)} without their sum, 'reward'")
    return terms.pop("reward"), terms
