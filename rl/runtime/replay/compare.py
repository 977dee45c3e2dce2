"""The first difference of two traces of an update, in the order in which an update comes about."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rl.runtime.replay.trace import UpdateTrace

# Stages of an update in their order, and what each is, for people.
STAGES = {
    "state": "weights and optimizer state before the update",
    "lease": "leased prompts and their order",
    "prompt": "tokens of the prompts",
    "tokens": "tokens of the rollouts",
    "logprobs": "log-probabilities of the sampler",
    "versions": "versions that drew the tokens",
    "reward": "rewards",
    "status": "verdicts that there are",
    "batch": "rows of the update and their order",
    "loss": "loss",
    "gradient": "gradients by array",
    "metrics": "figures of the update",
    "weights": "weights after the update",
}
_FEEDS = ("tokens", "logprobs", "loss", "gradient")  # stages of which a forward pass is a part


class StageDifference(NamedTuple):
    """The first difference of a stage."""

    stage: str  # one of `STAGES`
    name: str  # the array, as in the trace without the stage
    index: tuple[int, ...]  # index of the first element that differs; empty: of a scalar, or shapes differ
    sides: tuple[str, str]  # text of the element on both sides
    ulps: int | None  # distance of the two in units of the last place; None: they are no floats, or shapes differ
    arrays: int  # number of arrays of the stage that differ
    elements: int  # number of elements of this array that differ
    note: str = ""  # more of it, for people


def differences(a: UpdateTrace, b: UpdateTrace) -> list[StageDifference]:
    """Return the first difference of each stage that differs, in the order of the stages."""
    return [found for stage in STAGES if (found := _of_stage(a, b, stage)) is not None]


def _of_stage(a: UpdateTrace, b: UpdateTrace, stage: str) -> StageDifference | None:
    names = [name for name in sorted(a.arrays.keys() | b.arrays.keys()) if name.partition("/")[0] == stage]
    unequal = [name for name in names if not _same(a.arrays.get(name), b.arrays.get(name))]
    if not unequal:
        return None
    name = unequal[0]
    one, other = a.arrays.get(name), b.arrays.get(name)
    short, count = name.partition("/")[2], len(unequal)
    if one is None or other is None:
        return StageDifference(stage, short, (), (_shape(one), _shape(other)), None, count, 0)
    note = _exchanged(one, other) if stage == "batch" else ""
    if one.shape != other.shape and one.ndim == other.ndim == 1:  # completions of other lengths
        length = min(len(one), len(other))
        if _same(one[:length], other[:length]):
            sides = tuple("the end" if len(side) == length else str(side[length]) for side in (one, other))
            return StageDifference(
                stage, short, (length,), (sides[0], sides[1]), None, count, abs(len(one) - len(other))
            )
        one, other = one[:length], other[:length]
    if one.shape != other.shape or one.dtype != other.dtype:
        return StageDifference(stage, short, (), (_shape(one), _shape(other)), None, count, 0, note)
    places = np.argwhere(bits(one) != bits(other))
    index = tuple(int(i) for i in places[0])
    x, y = one[index], other[index]
    return StageDifference(stage, short, index, (_text(x), _text(y)), ulps(x, y), count, len(places), note)


def first_layer(a: UpdateTrace, b: UpdateTrace) -> tuple[str, int, int] | None:
    """Return the first layer whose activations differ, and rollout and position there; None: none, or not known.

    Rollouts are compared as far as their tokens are equal. Activations follow from weights and tokens, so they say
    nothing where the weights before the update differ.
    """
    x, y = (side.arrays.get("layers/marks") for side in (a, b))
    if x is None or y is None or a.samples != b.samples or _of_stage(a, b, "state") is not None:
        return None
    found: list[tuple[int, int, int]] = []
    for rollout, length in enumerate(_equal_tokens(a, b)):
        places = np.argwhere(x[rollout, :, :length] != y[rollout, :, :length])
        if len(places):
            layer, position = (int(i) for i in places[0])
            found.append((layer, rollout, position))
    if not found:
        return None
    layer, rollout, position = min(found)
    last = x.shape[1] - 1
    name = "the embedding" if layer == 0 else "the logits" if layer == last else f"layer {layer - 1}"
    return name, rollout, position


def is_forward(stage: str) -> bool:
    """Return True if the first difference of a stage may come from a forward pass."""
    return stage in _FEEDS


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bits of floats as unsigned integers, other arrays as they are."""
    if array.dtype.kind != "f":
        return array
    return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")


def ulps(x: np.generic, y: np.generic) -> int | None:
    """Return how many floats of their type lie between two; None: they are no floats, or one is none."""
    if x.dtype.kind != "f" or not (np.isfinite(x) and np.isfinite(y)):
        return None
    own = f"i{x.dtype.itemsize}"
    a, b = (int(np.asarray(value).view(own)) for value in (x, y))
    lowest = -(1 << (8 * x.dtype.itemsize - 1))
    a, b = (value if value >= 0 else lowest - value for value in (a, b))
    return abs(a - b)


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and bool(np.array_equal(bits(one), bits(other)))


def _exchanged(one: np.ndarray, other: np.ndarray) -> str:
    """Say that an array has the same rows in another order, if it has."""
    if one.shape != other.shape or one.ndim < 1:
        return ""
    rows = ([row.tobytes() for row in np.ascontiguousarray(side)] for side in (one, other))
    x, y = rows
    moved = [i for i, pair in enumerate(zip(x, y, strict=True)) if pair[0] != pair[1]]
    return f"the same rows in another order (rows {', '.join(map(str, moved[:8]))})" if sorted(x) == sorted(y) else ""


def _equal_tokens(a: UpdateTrace, b: UpdateTrace) -> Iterator[int]:
    """Yield for each rollout the number of tokens, with the prompt's, that both have in common from the beginning."""
    names = sorted(name for name in a.arrays if name.startswith("tokens/"))
    for name in names:
        prompt = "prompt/" + re.split("/", name)[1]
        if not _same(a.arrays[prompt], b.arrays.get(prompt)):
            yield 0
            continue
        x, y = a.arrays[name], b.arrays.get(name, np.zeros(0, np.int32))
        length = min(len(x), len(y))
        unequal = np.flatnonzero(x[:length] != y[:length])
        yield len(a.arrays[prompt]) + (int(unequal[0]) if len(unequal) else length) - 1


def _shape(array: np.ndarray | None) -> str:
    return "nothing" if array is None else f"{array.dtype}{list(array.shape)}"


def _text(x: np.generic) -> str:
    return f"{x:.9g}" if x.dtype.kind == "f" else str(x)
