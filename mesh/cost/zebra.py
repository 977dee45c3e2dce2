"""Schedule and plan of zebra parallelism, from stated times: attention on one group of devices, experts on another.

HeterMoE, arXiv 2504.03871. Times are those of a layer's forward pass over a whole batch; a microbatch takes its part of
them. A backward pass takes three times as long, for every layer is recomputed in it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

Place = Literal["attention", "experts", "out", "back"]  # the groups, and the streams to experts and from them
_BACKWARD = 3.0


class ZebraTask(NamedTuple):
    """One program, or one transfer, of a microbatch."""

    place: Place
    kind: str  # forward, backward, own_forward and own_backward (experts on attention's devices), loss
    layer: int
    microbatch: int


@dataclasses.dataclass(frozen=True)
class SideTimes:
    """Seconds of a layer's forward pass over a whole batch, and what travels."""

    attention: float  # all but the experts, on attention's devices
    experts: float  # all experts on experts' devices
    own: float  # all experts on attention's devices
    sent: float  # bytes of a layer's tokens, in one direction
    bandwidth: float  # bytes/s between the groups, in one direction
    loss: float = 0.0  # the loss and its backward pass over a whole batch, on attention's devices
    start: float = 0.0  # seconds that a program takes longer, however few its rows


@dataclasses.dataclass(frozen=True)
class ZebraPlan:
    """The number of microbatches, where experts are, and what follows."""

    microbatches: int
    moved: tuple[int, ...]  # experts of each layer on attention's devices
    seconds: float  # seconds of a step
    alone: float  # seconds of the same on attention's devices alone
    hidden_from: float  # bytes/s from which transfers take no longer than the busier group
    break_even: float | None  # bytes/s from which the step is faster than alone; None: it never is

    def line(self) -> str:
        """Return the plan in one line."""
        counts = {count: self.moved.count(count) for count in sorted(set(self.moved))}
        moved = ", ".join(f"{count} of {layers} layers' experts" for count, layers in counts.items() if count) or "none"
        even = "no bandwidth is enough" if self.break_even is None else f"{self.break_even * 8e-9:.3g} Gbit/s"
        return (
            f"{self.microbatches} microbatches, on attention's devices {moved}: {self.seconds:.3g} s a step, "
            f"{self.alone:.3g} s without experts' devices; break-even bandwidth {even}, transfers hide from "
            f"{self.hidden_from * 8e-9:.3g} Gbit/s on"
        )


def zebra_tasks(microbatches: int, moved: Sequence[int]) -> dict[ZebraTask, tuple[ZebraTask, ...]]:
    """Return the tasks of a step, each with those that it waits for; every place computes its own in this order.

    All microbatches of a layer before those of the next one, then the loss of each, then the same backwards: no other
    order ends earlier, if the loss takes as long as a layer's attention (the paper's proof swaps neighbours; tests
    compare with all orders of small cases).
    """
    found: dict[ZebraTask, tuple[ZebraTask, ...]] = {}
    every, last = range(microbatches), len(moved) - 1

    def experts(kind: str, layer: int, j: int, after: ZebraTask) -> None:
        send, compute = ZebraTask("out", kind, layer, j), ZebraTask("experts", kind, layer, j)
        found[send] = (after,)
        found[compute] = (send,)
        found[ZebraTask("back", kind, layer, j)] = (compute,)

    def own(kind: str, layer: int, j: int) -> tuple[ZebraTask, ...]:
        task = ZebraTask("attention", f"own_{kind}", layer, j)
        return (ZebraTask("back", kind, layer, j), *((task,) if moved[layer] else ()))

    for layer in range(last + 1):
        for j in every:
            task = ZebraTask("attention", "forward", layer, j)
            found[task] = own("forward", layer - 1, j) if layer else ()
            experts("forward", layer, j, task)
        for j in every if moved[layer] else ():
            found[ZebraTask("attention", "own_forward", layer, j)] = (ZebraTask("attention", "forward", layer, j),)
    for j in every:
        task = ZebraTask("attention", "loss", last, j)
        found[task] = own("forward", last, j)
        experts("backward", last, j, task)
    for layer in range(last, -1, -1):
        kind = "loss" if layer == last else "backward"
        above = [ZebraTask("attention", kind, min(layer + 1, last), j) for j in every]
        for j in every if moved[layer] else ():
            found[ZebraTask("attention", "own_backward", layer, j)] = (above[j],)
        for j in every:
            task = ZebraTask("attention", "backward", layer, j)
            found[task] = (above[j], *own("backward", layer, j))
            if layer:
                experts("backward", layer - 1, j, task)
    return found


def task_seconds(task: ZebraTask, times: SideTimes, microbatches: int, share: float) -> float:
    """Return how long a task takes; `share`: of the layer's experts, on attention's devices."""
    passes = _BACKWARD if task.kind.endswith("backward") else 1.0
    if task.kind == "loss":
        return times.start + times.loss / microbatches
    if task.place in ("out", "back"):
        return times.sent / times.bandwidth / microbatches
    if task.place == "experts":
        whole = times.experts * (1.0 - share)
    else:
        whole = times.own * share if task.kind.startswith("own") else times.attention
    return times.start + passes * whole / microbatches


def makespan(tasks: Mapping[ZebraTask, Sequence[ZebraTask]], seconds: Mapping[ZebraTask, float]) -> float:
    """Return when the last task ends, if every place computes its own in the order of the mapping."""
    ends: dict[ZebraTask, float] = {}
    free: dict[str, float] = {}
    for task, before in tasks.items():
        begin = max((ends[one] for one in before), default=0.0)
        ends[task] = free[task.place] = max(begin, free.get(task.place, 0.0)) + seconds[task]
    return max(ends.values())


def step_seconds(times: SideTimes, microbatches: int, moved: Sequence[int], num_experts: int) -> float:
    """Return the seconds of a step, without the update."""
    tasks = zebra_tasks(microbatches, moved)
    shares = [count / num_experts for count in moved]
    return makespan(tasks, {task: task_seconds(task, times, microbatches, shares[task.layer]) for task in tasks})


def assign_experts(times: SideTimes, layers: int, num_experts: int, *, chunk: int, most: int | None) -> tuple[int, ...]:
    """Return how many experts of each layer go to attention's devices (Asym-EA).

    Where experts take longer than attention, every layer adds the difference to a gap. A chunk of c of the n experts on
    attention's devices closes c / n * (T_experts + T_own) of it: what one side no longer computes, and the other does.

    Args:
        times: those of both sides.
        layers: number of layers.
        num_experts: experts of a layer.
        chunk: experts that move together, as both groups have equally many on each device.
        most: experts of all layers that attention's devices have memory for; None: there is no limit.
    """
    gap = times.experts - times.attention
    closed = chunk / num_experts * (times.experts + times.own)
    if gap <= 0 or closed <= 0:
        return (0,) * layers
    if most is not None:
        gap = min(gap, most // chunk * closed / layers)
    open_gap, found = 0.0, list[int]()
    for _ in range(layers):
        open_gap += gap
        chunks = min(math.floor(open_gap / closed + 1e-9), (num_experts - 1) // chunk)
        open_gap -= chunks * closed
        found.append(chunks * chunk)
    return tuple(found)


def plan_zebra(
    times: SideTimes, layers: int, num_experts: int, choices: Sequence[int], *, chunk: int = 1, most: int | None = None
) -> ZebraPlan:
    """Return the plan of the shortest step; of equal ones that of the fewest microbatches.

    `choices`: numbers of microbatches into which a batch divides. Others: see `assign_experts`.
    """
    assigned = assign_experts(times, layers, num_experts, chunk=chunk, most=most)
    ways = [(count, moved) for count in sorted(choices) for moved in dict.fromkeys(((0,) * layers, assigned))]
    # A step that is shorter by less than a thousandth is not.
    count, moved = min(ways, key=lambda way: (round(math.log(step_seconds(times, *way, num_experts)), 3), way[0]))
    alone = layers * (1 + _BACKWARD) * (times.attention + times.own) + times.loss
    share = sum(moved) / (layers * num_experts)
    busier = max(times.attention + times.own * share, times.experts * (1 - share))

    def faster(bandwidth: float) -> bool:
        return step_seconds(dataclasses.replace(times, bandwidth=bandwidth), count, moved, num_experts) < alone

    even = _least(faster, times.sent / alone) if faster(math.inf) else None
    seconds = step_seconds(times, count, moved, num_experts)
    return ZebraPlan(count, moved, seconds, alone, times.sent / busier, even)


def _least(true_from: Callable[[float], bool], first: float) -> float:
    """Return the least number for which a condition holds, that holds for all larger ones, to a thousandth."""
    low, high = first, first
    while not true_from(high):
        low, high = high, high * 2
    while true_from(low):
        low, high = low / 2, low
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if true_from(middle) else (middle, high)
    return high
