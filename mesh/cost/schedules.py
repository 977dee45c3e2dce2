"""Schedules of microbatches over stages: orders of work, and by a model of events the time and memory that they take.

A schedule is an order of operations on each resource (a stage, a group of devices, a direction of a link), and what
each operation waits for. An operation begins when its resource is free and what it waits for is done. Pure functions.

* Pipelines: GPipe (arXiv 1811.06965), one forward one backward (PipeDream-Flush, arXiv 2006.09503), and interleaved
  stages (Megatron-LM, arXiv 2104.04473, 2.2).
* Zebra (HeterMoE, arXiv 2504.03871): attention on one group of devices, experts on another, and a link each way.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

from mesh.errors import UserError

Name = tuple[Hashable, ...]


class Op(NamedTuple):
    """One operation.

    Attributes:
        name: its kind, and layer or stage and microbatch.
        seconds: how long its resource is busy.
        after: names of operations that are done before.
    """

    name: Name
    seconds: float
    after: tuple[Name, ...] = ()


Orders = Mapping[str, Sequence[Op]]  # resource -> its operations, in order


def run_orders(orders: Orders) -> dict[Name, tuple[float, float]]:
    """Return when each operation begins and ends, in seconds.

    Raises:
        UserError: operations wait for each other in a circle, or for one that is nowhere.
    """
    times: dict[Name, tuple[float, float]] = {}
    at = dict.fromkeys(orders, 0)
    free = dict.fromkeys(orders, 0.0)
    moved = True
    while moved:
        moved = False
        for resource, ops in orders.items():
            while at[resource] < len(ops) and all(name in times for name in ops[at[resource]].after):
                op = ops[at[resource]]
                begin = max([free[resource], *(times[name][1] for name in op.after)])
                times[op.name] = begin, begin + op.seconds
                free[resource], moved = begin + op.seconds, True
                at[resource] += 1
    left = {resource: ops[at[resource]].name for resource, ops in orders.items() if at[resource] < len(ops)}
    if left:
        raise UserError(f"orders: {left} never begin; expected operations that wait for earlier ones alone")
    return times


def makespan(orders: Orders) -> float:
    """Return when the last operation ends."""
    return max(end for _, end in run_orders(orders).values())


def idle_share(orders: Orders) -> dict[str, float]:
    """Return the share of the makespan in which each resource does nothing: of a pipeline's stages, the bubble."""
    whole = makespan(orders)
    return {resource: 1 - sum(op.seconds for op in ops) / whole for resource, ops in orders.items()}


Kind = Literal["gpipe", "1f1b", "interleaved"]


class PipelineShape(NamedTuple):
    """A pipeline.

    Attributes:
        stages: devices in a row.
        microbatches: parts of a batch.
        forward: seconds of a microbatch in all layers of a device.
        backward: the same of the backward pass.
        chunks: parts of a device's layers that are not neighbours; more than 1 for interleaved stages alone.
    """

    stages: int
    microbatches: int
    forward: float = 1.0
    backward: float = 2.0
    chunks: int = 1


def pipeline_orders(kind: Kind, shape: PipelineShape) -> dict[str, list[Op]]:
    """Return the orders of the stages: ops `("F" or "B", part of the layers, microbatch)`.

    Raises:
        UserError: chunks without interleaving, or microbatches that do not divide into rounds of the stages.
    """
    stages, count, chunks = shape.stages, shape.microbatches, shape.chunks
    if (chunks > 1) != (kind == "interleaved"):
        expected = "2 or more for interleaved stages" if kind == "interleaved" else f"1 for {kind}"
        raise UserError(f"PipelineShape.chunks is {chunks}; expected {expected}")
    if kind == "interleaved" and count % stages:
        raise UserError(f"PipelineShape.microbatches is {count}; expected a multiple of the {stages} stages")
    last = stages * chunks - 1

    def forward(part: int, batch: int) -> Op:
        after = (("F", part - 1, batch),) if part else ()
        return Op(("F", part, batch), shape.forward / chunks, after)

    def backward(part: int, batch: int) -> Op:
        after = (("F", last, batch),) if part == last else (("B", part + 1, batch),)
        return Op(("B", part, batch), shape.backward / chunks, after)

    def order(stage: int) -> list[Op]:
        turns = [(r, c, b) for r in range(-(-count // stages)) for c in range(chunks) for b in range(stages)]
        turns = [(c, r * stages + b) for r, c, b in turns if r * stages + b < count]
        forwards = [forward(c * stages + stage, batch) for c, batch in turns]
        backwards = [backward((chunks - 1 - c) * stages + stage, batch) for c, batch in turns]
        if kind == "gpipe":
            return [*forwards, *backwards[::-1]]
        warm = stages - 1 - stage if kind == "1f1b" else 2 * (stages - 1 - stage) + (chunks - 1) * stages
        warm = min(warm, len(forwards))
        steady = [op for pair in zip(forwards[warm:], backwards, strict=False) for op in pair]
        return [*forwards[:warm], *steady, *backwards[len(forwards) - warm :]]

    return {f"stage {stage}": order(stage) for stage in range(stages)}


def most_held(orders: Orders) -> dict[str, int]:
    """Return for each stage the microbatches (of a part of its layers) whose activations it holds at once, at most."""
    found: dict[str, int] = {}
    for resource, ops in orders.items():
        held = peak = 0
        for op in ops:
            held += 1 if op.name[0] == "F" else -1
            peak = max(peak, held)
        found[resource] = peak
    return found
