"""The check of what a scorer returned: a finite number, alone or with named terms. Nothing else is a reward."""

import decimal
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_TERMS = 32
_LONGEST_NAME = 64


class NotAReward(TypeError):
    """A scorer returned something that is no finite number."""


def check_rewards(values: Any, count: int) -> list[tuple[float, dict[str, float]] | Exception]:
    """Return (reward, terms) of each of the `count` answers that a scorer was given, or the exception of one answer.

    Raises:
        NotAReward: another number of values, or one that is neither a finite number nor terms with a "reward".
    """
    values = as_list(values)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise NotAReward(f"the scorer returned {describe(values)} for {count} answers; expected a list of numbers")
    if len(values) != count:
        raise NotAReward(f"the scorer returned {len(values)} values for {count} answers")
    return [_reward(value) for value in values]


def check_terms(terms: Mapping[Any, Any]) -> dict[str, float]:
    """Return named terms as floats (NotAReward: a name is no short text, a value no finite number, or too many)."""
    if len(terms) > MAX_TERMS:
        raise NotAReward(f"{len(terms)} terms; expected {MAX_TERMS} at most")
    for name in terms:
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise NotAReward(f"a term is named {describe(name)}; expected a text of 1 to {_LONGEST_NAME} characters")
    return {name: number(value, f"term {name!r}") for name, value in terms.items()}


def number(value: Any, what: str = "the scorer") -> float:
    """Return a finite number as a float; booleans are 0 and 1, and text is none (NotAReward: it is something else)."""
    if _is_array(value) and (array := np.asarray(value)).size == 1:
        value = array.reshape(-1).tolist()[0]
    if not isinstance(value, numbers.Real | np.bool_ | decimal.Decimal):
        raise NotAReward(f"{what} returned {describe(value)}; expected a finite number")
    try:
        finite = float(value)
    except OverflowError:
        finite = math.inf
    if not math.isfinite(finite):
        raise NotAReward(f"{what} returned {finite}; expected a finite number")
    return finite


def as_list(value: Any) -> Any:
    """Return an array of numpy, jax or torch as a list, and anything else as it is."""
    return np.asarray(value).tolist() if _is_array(value) else value


def error_text(error: BaseException) -> str:
    """Return what is kept of an error of a scorer."""
    return f"{type(error).__name__}: {error}"[:500]


def describe(value: Any) -> str:
    """Return a short text of a value for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, Sequence | Mapping)


def _reward(value: Any) -> tuple[float, dict[str, float]] | Exception:
    if isinstance(value, Exception):
        return value
    if not isinstance(value, Mapping):
        return number(value), {}
    terms = check_terms(value)
    if "reward" not in terms:
        raise NotAReward(f"terms {sorted(terms)} without their sum, 'reward'")
    return terms.pop("reward"), terms
