"""Zebra parallelism (HeterMoE, arXiv 2504.03871): attention and experts on two groups of devices, and what it takes.

Newer chips are many times faster at attention and hardly faster at experts, so each group does what it is best at. R
microbatches are under way, so that both are busy; rows travel over a link of two directions that do not contend.
"""

import math
from typing import NamedTuple

from mesh.cost.schedules import Name, Op, Orders, makespan
from mesh.errors import UserError


class ZebraShape(NamedTuple):
    """A step on two groups of devices. Times are seconds of a microbatch in a layer, of a group as a whole.

    Attributes:
        layers: layers with experts.
        microbatches: parts of a batch that are under way at once.
        attention: attention and what else is not experts, on its group.
        experts: all experts, on their group.
        transfer: rows, in one direction.
        backward: how many times as long the backward pass takes, transfers excepted.
        head: what follows the last experts, on attention's devices: final norm, logits, loss.
    """

    layers: int
    microbatches: int
    attention: float
    experts: float
    transfer: float = 0.0
    backward: float = 2.0
    head: float = 0.0


def zebra_orders(shape: ZebraShape) -> dict[str, list[Op]]:
    """Return the orders of both groups and both directions, those of the paper's theorem: none ends earlier.

    That holds for a head that takes half as long as attention, or longer. Without one, and with attention the slower
    group, brute force finds orders that end up to a tenth earlier in one or two layers.

    Attention goes forward layer by layer, microbatch by microbatch; in the last part, behind the last experts, each
    microbatch goes forward and at once backward; then backward layer by layer. Experts do the same without the turn.
    Names are `(kind, layer, microbatch)`: A and E for attention and experts, D and C for rows to experts and back, in
    small letters for the backward pass; attention's part `layers` is what follows the last experts: head and loss.
    """
    layers, batches = shape.layers, range(shape.microbatches)
    orders: dict[str, list[Op]] = {"attention": [], "experts": [], "to experts": [], "to attention": []}

    def add(resource: str, name: Name, seconds: float, *after: Name) -> None:
        orders[resource].append(Op(name, seconds, after))

    for i in range(layers):
        for j in batches:
            add("attention", ("A", i, j), shape.attention, *([("C", i - 1, j)] if i else []))
            add("to experts", ("D", i, j), shape.transfer, ("A", i, j))
            add("experts", ("E", i, j), shape.experts, ("D", i, j))
            add("to attention", ("C", i, j), shape.transfer, ("E", i, j))
    for j in batches:
        add("attention", ("A", layers, j), shape.head, ("C", layers - 1, j))
        add("attention", ("a", layers, j), shape.backward * shape.head, ("A", layers, j))
    for i in reversed(range(layers)):
        for j in batches:
            add("to experts", ("c", i, j), shape.transfer, ("a", i + 1, j))
            add("experts", ("e", i, j), shape.backward * shape.experts, ("c", i, j))
            add("to attention", ("d", i, j), shape.transfer, ("e", i, j))
            add("attention", ("a", i, j), shape.backward * shape.attention, ("d", i, j))
    return orders


def in_turn(shape: ZebraShape) -> float:
    """Return the seconds of the same step without overlap: one group waits for the other, and both for the link."""
    compute = (1 + shape.backward) * (shape.layers * (shape.attention + shape.experts) + shape.head)
    return shape.microbatches * (compute + 4 * shape.layers * shape.transfer)


def zebra_ratio(shape: ZebraShape) -> float:
    """Return how many times as fast a step is by the schedule as without overlap; below 2 for equal groups."""
    return in_turn(shape) / makespan(zebra_orders(shape))


def break_even_bandwidth(shape: ZebraShape, nbytes: float) -> float:
    """Return the bytes a second in each direction at which the link is as busy as the busier group in a forward pass.

    Below it the link decides, and nothing hides it: HeterMoE's own failure at 20 Gbps.

    Args:
        shape: the step.
        nbytes: bytes of a microbatch's rows in a layer, in one direction.
    """
    return nbytes / max(shape.attention, shape.experts)


class Squeeze(NamedTuple):
    """Experts that move to the attention group so that both groups take as long.

    Attributes:
        moved: experts of each layer that attention's devices compute.
        attention: seconds of the attention group in the mean layer, with those.
        experts: seconds of the experts' group in the mean layer, without them.
    """

    moved: tuple[int, ...]
    attention: float
    experts: float


class DeviceGroups(NamedTuple):
    """The two groups of devices.

    Attributes:
        attention: devices with attention.
        experts: devices with experts.
        num_experts: experts of a layer.
        expert_on_attention: seconds of a microbatch in one expert, were it alone on one of attention's devices.
        expert_on_experts: the same on one of the experts' devices.
        most: experts of all layers that the attention group has memory for.
    """

    attention: int
    experts: int
    num_experts: int
    expert_on_attention: float
    expert_on_experts: float
    most: int


def squeeze(layers: int, attention: float, groups: DeviceGroups) -> Squeeze:
    """Return which layers lend how many experts to attention's devices (asymmetric assignment, derived here).

    A chunk of experts is the least that leaves the devices of each group alike: lcm(M, N) of them, so lcm / M for each
    of attention's M devices, taken from N that hold the same number. It takes from the experts' group lcm / N times the
    time of one of its experts, and adds lcm / M times that of one of attention's. The gap between the groups grows by
    their difference with each layer; a layer lends as many chunks as close what has gathered. (Algorithm 1 of the paper
    prints the two counts the other way round, against its text.)

    Args:
        layers: number of layers.
        attention: seconds of attention on its group.
        groups: the groups.

    Raises:
        UserError: experts do not divide evenly over their devices.
    """
    if groups.num_experts % groups.experts:
        raise UserError(
            f"DeviceGroups.num_experts is {groups.num_experts}; expected a multiple of the {groups.experts} devices"
        )
    chunk = math.lcm(groups.attention, groups.experts)
    taken = chunk / groups.experts * groups.expert_on_experts
    given = chunk / groups.attention * groups.expert_on_attention
    whole = groups.num_experts / groups.experts * groups.expert_on_experts
    moved: list[int] = []
    gathered, left = 0.0, groups.most // chunk
    for _ in range(layers):
        gathered += max(0.0, whole - attention)
        chunks = min(int(gathered / (taken + given) + 1e-9), groups.num_experts // chunk, left)
        gathered, left = gathered - chunks * (taken + given), left - chunks
        moved.append(chunks * chunk)
    mean = sum(moved) / chunk / layers
    return Squeeze(tuple(moved), attention + mean * given, whole - mean * taken)


def asymmetric_ratio(shape: ZebraShape, groups: DeviceGroups) -> float:
    """Return how many times as fast a step is with moved experts as without, layer by layer of the schedule."""
    found = squeeze(shape.layers, shape.attention, groups)
    chunk = math.lcm(groups.attention, groups.experts)
    before = zebra_orders(shape)

    def other(op: Op) -> Op:
        kind, layer, _ = op.name
        if kind not in ("A", "a", "E", "e") or layer == shape.layers:
            return op
        assert isinstance(layer, int)
        chunks, times = found.moved[layer] / chunk, 1.0 if kind in ("A", "E") else shape.backward
        if kind in ("A", "a"):
            return op._replace(
                seconds=op.seconds + times * chunks * chunk / groups.attention * groups.expert_on_attention
            )
        return op._replace(seconds=op.seconds - times * chunks * chunk / groups.experts * groups.expert_on_experts)

    after: Orders = {resource: [other(op) for op in ops] for resource, ops in before.items()}
    return makespan(before) / makespan(after)
