"""Search for the place where two runs part: the first update by their records, then event and array by making it again.

That two versions are equal says nothing about those before them, so all records are compared, from the first on; that
costs nothing. Versions without a record on a side are made again, all of them on one way to the update.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.layers.parameter_names import path_name
from rl.runtime.replay.compare import STAGES, StageDifference, differences, first_layer, is_forward
from rl.runtime.replay.record import RunRecord, Unequal, config_differences
from rl.runtime.replay.trace import UpdateTrace
from rl.runtime.replay.update import Replay

_STACKS = ("layers/", "leading/", "tail/")  # begin names of arrays with an axis of layers
_STAGE = {
    "rollouts": "tokens",
    "rewards": "reward",
    "metrics": "metrics",
    "weights": "weights",
}  # stage by part of a record
Text = Callable[[Sequence[int]], str]  # text of tokens
# Makes an update again, with what it was made of, from a checkpoint of at most so many updates.
Tracer = Callable[[int, int], Replay]


@dataclasses.dataclass(frozen=True)
class Located:
    """Place where two runs part."""

    update: int  # number of the first update that differs
    event: str  # stage of the update in which the first difference is, one of `STAGES`
    array: str  # an array, a metric, or a rollout as PROMPT:SAMPLE
    index: tuple[int, ...]  # first element that differs; empty: not known
    sides: tuple[str, str]  # text of that element in both runs
    ulps: int | None  # distance of the two in units of the last place, if they are floats
    layer: str | None  # layer of that element, or the first one whose activations differ
    stages: list[StageDifference]  # first difference of each stage, by making the update again in both runs
    records: list[Unequal]  # finding in the records of the update
    # Sides whose own record is not what the update gives when it is made again, and in what
    stray: dict[str, list[Unequal]]
    said: str  # the difference in words


def first_unequal(a: RunRecord, b: RunRecord) -> tuple[int, list[Unequal]] | None:
    """Return the first update that both have recorded and not alike, and in what; None: there is none."""
    both = [update for update in [0, *a.updates] if update == 0 or update in set(b.updates)]
    return next(((update, found) for update in both if (found := [*a.unequal(b, update)])), None)


def bisect(
    a: RunRecord, b: RunRecord, trace_a: Tracer, trace_b: Tracer, text: Text = str, update: int | None = None
) -> Located | None:
    """Return where runs part, None: nowhere; traces make an update again; `update`: this, else the first by records."""
    if update is None:
        if (found := first_unequal(a, b)) is None:
            return None
        update, records = max(1, found[0]), found[1]  # other weights at the start show before the first update
    else:
        records = [*a.unequal(b, update)]
    since = max((n for n in range(update) if a.has_equal(b, n)), default=0)
    one, other = trace_a(update, since), trace_b(update, since)
    unrecorded = [n for n in sorted(one.versions.keys() & other.versions.keys()) if 0 < n < update]
    unrecorded = [n for n in unrecorded if not a.has_equal(b, n) and one.versions[n] != other.versions[n]]
    if unrecorded:
        update = unrecorded[0]
        one, other = trace_a(update, since), trace_b(update, since)
    stages = differences(one.trace, other.trace)
    stray = {name: side.unequal[1] for name, side in (("A", one), ("B", other)) if side.unequal is not None}
    if stages:
        return _by_traces(update, stages, (one.trace, other.trace), records, stray, text)
    return _by_records(update, (a, b), one.trace, records, stray) if records or stray else None


def _by_traces(
    update: int,
    stages: list[StageDifference],
    traces: tuple[UpdateTrace, UpdateTrace],
    records: list[Unequal],
    stray: dict[str, list[Unequal]],
    text: Text,
) -> Located:
    first = stages[0]
    array, said = _words(first, traces[0], traces[1], text)
    layer = _layer(first.name, first.index) if first.stage in ("weights", "gradient", "state") else None
    if is_forward(first.stage) and (found := first_layer(*traces)) is not None:
        name, rollout, position = found
        where = "{}:{}".format(*traces[0].samples[rollout])
        said += f" With equal weights, {name} is the first whose activations differ: {where}, position {position}."
        layer = name
    ulps = None if first.stage == "reward" else first.ulps
    known: dict[str, Any] = {"index": first.index, "sides": first.sides, "ulps": ulps, "layer": layer}
    return Located(update, first.stage, array, stages=stages, records=records, stray=stray, said=said, **known)


def _by_records(
    update: int, runs: tuple[RunRecord, RunRecord], trace: UpdateTrace, records: list[Unequal], stray: dict[str, Any]
) -> Located:
    """Locate what making the update again does not repeat: a fault that passed, or what differs elsewhere."""
    side = next(iter(stray), "B")
    [first, *_] = stray.get(side) or records
    event, array, known = _STAGE[first.part], ", ".join(map(str, first.what[:3])), _Place((), first.sides)
    if first.part in ("rollouts", "rewards"):
        prompts = [int(prompt) for prompt in trace.arrays["lease/prompts"]]
        array = ", ".join(f"prompt {prompts[n]}" if n < len(prompts) else f"group {n}" for n in first.what[:3])
    elif first.part == "weights":
        names = sorted(name.removeprefix("weights/") for name in trace.arrays if name.startswith("weights/"))
        array = ", ".join(names[n] for n in first.what[:3] if n < len(names)) or "an array of the version"
        known = _saved(runs["AB".index(side)], update, trace) or known
        array = known.name or array
    run = runs["AB".index(side)].path.name
    said = (
        f"The record of {side} is not what its update gives when it is made again here: {STAGES[event]} ({array}). "
        "Either something passed that day, or another machine, version or commit has made it. A trace made there "
        f"(axl replay {run} --update {update} --trace FILE) tells more: axl bisect A B --trace-{side.lower()} FILE"
    )
    places: dict[str, Any] = {"index": known.index, "sides": known.sides, "ulps": known.ulps}
    places["layer"] = _layer(known.name, known.index)
    return Located(update, event, array, stages=[], records=records, stray=stray, said=said, **places)


@dataclasses.dataclass(frozen=True)
class _Place:
    index: tuple[int, ...]
    sides: tuple[str, str]
    ulps: int | None = None
    name: str = ""


def _saved(run: RunRecord, update: int, trace: UpdateTrace) -> _Place | None:
    """Return the first element in which a checkpoint of the version differs from the trace; None: it has none."""
    path = run.checkpoint(update)
    if path is None or int(path.name) != update:
        return None
    saved = restore_params(path)
    arrays = {f"weights/{path_name(key)}": np.asarray(x) for key, x in jax.tree_util.tree_leaves_with_path(saved)}
    made = {name: array for name, array in trace.arrays.items() if name.startswith("weights/")}
    found = differences(UpdateTrace(trace.samples, made), UpdateTrace(trace.samples, arrays))
    return _Place(found[0].index, found[0].sides, found[0].ulps, found[0].name) if found else None


def _layer(name: str, index: tuple[int, ...]) -> str | None:
    """Return the layer of an element of stacked parameters; None: it is in none."""
    stacked = any(f"/{name}".find(f"/{stack}") >= 0 for stack in _STACKS)
    return f"layer {index[0]}" if stacked and index else None


def _words(found: StageDifference, a: UpdateTrace, b: UpdateTrace, text: Text) -> tuple[str, str]:
    """Return what differs, and a sentence about it."""
    stage, name, sides = found.stage, found.name, "{} in A, {} in B".format(*found.sides)
    place = f"[{', '.join(map(str, found.index))}]" if found.index else ""
    if stage in ("tokens", "logprobs", "versions", "reward", "status", "prompt"):
        group, _, number = name.partition("/")
        prompt = int(a.arrays["lease/prompts"][int(group)])
        number = number or (str(found.index[0]) if found.index and stage != "prompt" else "")
        array = f"{prompt}:{int(number)}" if number else f"prompt {prompt}"
        if stage != "tokens":
            what = {"reward": "the reward", "status": "the verdict"}.get(stage, f"{STAGES[stage]}, number {place}")
            return array, f"{array}: {what} is {sides}."
        at, whole = found.index[0], a.arrays[f"tokens/{name}"]
        words = [repr(text([int(side)])) if side.isdecimal() else side for side in found.sides]
        before = repr(text([int(token) for token in whole[max(0, at - 8) : at]]))
        x, y = (f"{number} ({word})" for number, word in zip(found.sides, words, strict=True))
        return array, f"{array}: token {at} is {x} in A, {y} in B, after {before}."
    if stage == "lease":
        return name, f"Place {place} of the batch has {'prompt ' if name == 'prompts' else 'draw '}{sides}."
    far = (
        ""
        if found.ulps is None
        else f", {found.ulps} {'unit' if found.ulps == 1 else 'units'} of the last place apart"
        if found.ulps < 1 << 16
        else ""
    )
    others = f"; {found.elements} of its elements differ" if found.elements > 1 else ""
    others += f", and {found.arrays - 1} more arrays" if found.arrays > 1 else ""
    if found.note:
        return name, f"{name}: {found.note}."
    if stage == "state":  # digests are no text for people
        return name, f"{name} differs before the update already{others}."
    layer = _layer(name, found.index)
    return name, f"{name}{place}{f' ({layer})' if layer else ''} is {sides}{far}{others}."


__all__ = ["Located", "bisect", "config_differences", "first_unequal"]
