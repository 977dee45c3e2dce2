"""Placement of experts as data: a table layer x slot -> expert, and which share of an expert's rows each slot takes.

A device computes a few *slots*, each with a copy of one expert; a popular expert has several copies (*replicas*), on
different devices. Everything is a function of counts that all devices know, without random numbers, so all compute the
same plan without talking to each other.

Within this file a table is int [devices, slots], -1 where a slot is empty, those of a device filled from the first on;
`used` counts the filled slots of each device, `loads` what they take, `each` is the load of one replica of each expert.
"""

import dataclasses
from typing import Any

import numpy as np

from mesh.errors import UserError

WHOLE = 4096  # parts of an expert's rows that its slots share: a power of two, for exact arithmetic on devices
_SWEEPS = 24  # sweeps of `share_rows`, at most
_CLOSE = 1.005  # ratio of busiest device and mean at which they end

Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """The places of experts. Slots are numbered device by device."""

    experts: Array  # int32 [layers, slots], the expert of each slot
    # int32 [layers, slots], the end of the slot's part of its expert's rows, in `WHOLE`ths; the part begins where that
    # of the expert's slot before ends, and the last one ends at `WHOLE`
    ends: Array
    devices: int  # number of devices

    def check(self, layers: int, num_experts: int, slots: int) -> None:
        """Refuse a plan of another model, or for other devices (UserError)."""
        if self.experts.shape != (layers, slots):
            raise UserError(
                f"plan: a table of {self.experts.shape[0]} layers and {self.experts.shape[1]} slots; expected {layers} "
                f"layers and {slots} slots, those of this model on this mesh"
            )
        for layer, row in enumerate(self.experts):
            if not np.array_equal(np.unique(row), np.arange(num_experts)):
                raise UserError(f"plan: layer {layer} has not the experts 0 to {num_experts - 1}; expected all of them")

    def replicas(self, num_experts: int) -> Array:
        """Return int [layers, experts], the slots of each expert."""
        return np.stack([np.bincount(row, minlength=num_experts) for row in self.experts])

    def device_loads(self, loads: Array) -> Array:
        """Return float64 [layers, devices] of loads [layers, experts]: the rows that each device takes."""
        shares = slot_shares(self.experts, self.ends) / WHOLE
        taken = np.take_along_axis(np.asarray(loads, np.float64), self.experts, axis=1) * shares
        return taken.reshape(len(taken), self.devices, -1).sum(axis=2)

    def busiest_to_mean(self, loads: Array) -> float:
        """Return the load of the busiest device over the mean, in the worst layer; 1 without any load."""
        found = self.device_loads(loads)
        mean = found.mean(axis=1)
        return float(np.max(np.where(mean > 0, found.max(axis=1) / np.where(mean > 0, mean, 1), 1.0)))


def make_plan(loads: Array, devices: int, slots: int) -> ExpertPlan:
    """Return the plan for loads [layers, experts], each layer's by itself.

    Args:
        loads: rows of each expert, or any multiple of them.
        slots: slots of each.

    Raises:
        UserError: fewer slots than experts.
    """
    layers, num_experts = loads.shape
    if devices * slots < num_experts:
        raise UserError(
            f"replicas: {devices * slots} slots ({devices} devices with {slots} each) for {num_experts} experts; "
            f"expected {-(-num_experts // devices)} or more on each"
        )
    experts, ends = np.zeros((2, layers, devices * slots), np.int32)
    for layer, load in enumerate(np.asarray(loads, np.float64)):
        table = balanced(load, allocate(load, devices * slots, devices), devices, slots)
        experts[layer], ends[layer] = table.reshape(-1), share_rows(table, load).reshape(-1)
    return ExpertPlan(experts, ends, devices)


def allocate(loads: Array, slots: int, most: int, least: int = 1) -> Array:
    """Return int [experts], replicas in proportion to loads: never fewer for a more popular expert, `slots` in all.

    From the least popular on, each gets its share of the slots left, rounded down, but `least`, for which there must be
    room (Lazarus, arXiv 2407.04656, equation 1). What is above `most`, the devices on which copies could be, goes to
    the next popular ones; if all have that many, slots are left over.
    """
    loads = np.maximum(np.asarray(loads, np.float64), 0)
    order = np.argsort(loads, kind="stable")
    rest = np.cumsum(loads[order][::-1])[::-1]
    found, left = np.zeros(len(loads), np.int64), slots
    for place, expert in enumerate(order):
        share = loads[expert] / rest[place] if rest[place] > 0 else 1 / (len(loads) - place)
        found[expert] = max(int(left * share + 1e-9), least)
        left -= int(found[expert])
    for expert in order[::-1]:  # rounding left some, or copies would be twice on a device
        left += max(0, int(found[expert]) - most)
        found[expert] = min(found[expert], most)
        more = min(left, most - int(found[expert]))
        found[expert], left = found[expert] + more, left - more
    return found


def balanced(load: Array, replicas: Array, devices: int, slots: int) -> Array:
    """Return a table: experts from the most loaded replica on, each on the least loaded devices that have none of it.

    Slots that are left go to the most loaded expert that the device has not, or to one that it has.
    """
    table = np.full((devices, slots), -1, np.int64)
    loads, used = np.zeros(devices), np.zeros(devices, np.int64)
    each = load / replicas
    popular = np.argsort(-each, kind="stable")
    for expert in popular:
        free = np.nonzero((used < slots) & ~np.any(table == expert, axis=1))[0]
        chosen = free[np.lexsort((free, used[free], loads[free]))[: int(replicas[expert])]]
        table[chosen, used[chosen]] = expert
        used[chosen] += 1
        loads[chosen] += each[expert]
    for device in np.nonzero(used < slots)[0]:
        others = popular[~np.isin(popular, table[device, : used[device]])]
        table[device, used[device] :] = np.concatenate([others, popular.repeat(slots)])[: slots - used[device]]
    return table


def allocate_groups(load: Array, devices: int, slots: int, least: int) -> Array:
    """Return int [experts], replicas for `overlapped`: equal within a group, and by the group's load, `least` or more.

    Lazarus allocates to each expert alone. Then a group has as many devices as its least popular expert has replicas,
    however popular the others are, and with few slots its devices are overloaded. Here the next device goes to the
    group with the most load on each. Where groups are too many for that, or uneven, replicas are as `allocate` says.
    """
    groups = _by_popularity(load, slots)
    if len(load) % slots or len(groups) * least > devices:
        return allocate(load, devices * slots, devices, least)
    count, loads = np.full(len(groups), least), np.array([load[group].sum() for group in groups])
    for _ in range(devices - int(count.sum())):
        count[np.argmax(loads / count)] += 1
    found = np.zeros(len(load), np.int64)
    for group, devices_of_group in zip(groups, count, strict=True):
        found[group] = devices_of_group
    return found


def _by_popularity(load: Array, slots: int) -> list[Array]:
    """Return experts in groups of as many as there are slots, the least popular first, whose group may be smaller."""
    order = np.argsort(load, kind="stable")
    first = len(order) % slots or slots
    return [order[:first], *(order[at : at + slots] for at in range(first, len(order), slots))]


def overlapped(load: Array, replicas: Array, devices: int, slots: int) -> Array:
    """Return a table by Maximum Rank Overlap, which survives the most losses of devices (Lazarus, 4.2).

    Experts are grouped by popularity, as many as a device has slots. A group's devices hold all of its experts, and are
    as many as its least popular one has replicas: so where that one survives, the others do. The smallest group is the
    least popular one; replicas that are left go to its free slots, and to those that the last group's devices have.
    """
    groups, table, used = _by_popularity(load, slots), np.full((devices, slots), -1, np.int64), 0
    for number, group in enumerate(groups):
        count = devices - used if number == len(groups) - 1 else int(replicas[group[0]])
        table[used : used + count, : len(group)] = group
        used += count
    missing = replicas - np.array([np.any(table == expert, axis=1).sum() for expert in range(len(load))])
    for expert in np.argsort(-missing, kind="stable"):
        for _ in range(int(missing[expert])):
            free = np.sum(table == -1, axis=1) * ~np.any(table == expert, axis=1)
            if free.max() == 0:
                break
            device = int(np.argmax(free))
            table[device, np.argmax(table[device] == -1)] = expert
    return table


def share_rows(table: Array, load: Array) -> Array:
    """Return int32 [devices, slots], `ExpertPlan.ends`: the busiest device has as little as this table allows, nearly.

    Each expert in turn pours its rows into its devices, the emptiest first, until levels of all stand still: the least
    sum of squared loads, which is convex. Copies of an expert on one device count as one, the first.
    """
    devices, experts = len(table), len(load)
    where = [np.unique(np.nonzero(table == expert)[0]) for expert in range(experts)]
    parts = [np.full(len(on), amount / len(on)) for on, amount in zip(where, load, strict=True)]
    loads = np.zeros(devices)
    for on, part in zip(where, parts, strict=True):
        loads[on] += part
    several = [expert for expert in np.argsort(-load, kind="stable") if len(where[expert]) > 1]
    for _ in range(_SWEEPS):
        if loads.max() <= _CLOSE * loads.mean():
            break
        for expert in several:
            on = where[expert]
            loads[on] -= parts[expert]
            parts[expert] = _pour(loads[on], float(load[expert]))
            loads[on] += parts[expert]
    ends = np.zeros(table.shape, np.int32)
    for expert in range(experts):
        up_to = np.cumsum(largest_remainder(parts[expert], WHOLE))
        rows, columns = np.nonzero(table == expert)
        ends[rows, columns] = up_to[np.searchsorted(where[expert], rows)]
    return ends


def largest_remainder(weights: Array, total: int) -> Array:
    """Return integers with this sum, in proportion to weights: rounded down, and up where the most is lost.

    Of equals, the first is rounded up. Weights that are all 0 count as equal.
    """
    weights = np.asarray(weights, np.float64)
    weights = weights if weights.sum() > 0 else np.ones_like(weights)
    exact = total * weights / weights.sum()
    floor = np.floor(exact).astype(np.int64)
    missing = total - int(floor.sum())
    floor[np.argsort(floor - exact, kind="stable")[:missing]] += 1
    return floor


def slot_shares(experts: Array, ends: Array) -> Array:
    """Return int [layers, slots], the parts in `WHOLE`ths, of a plan's arrays."""
    order = np.argsort(experts, axis=1, kind="stable")
    sorted_experts, sorted_ends = (np.take_along_axis(a, order, axis=1) for a in (experts, ends))
    before = np.pad(sorted_ends, ((0, 0), (1, 0)))[:, :-1]
    same = np.pad(sorted_experts[:, 1:] == sorted_experts[:, :-1], ((0, 0), (1, 0)))
    shares = np.empty_like(ends)
    np.put_along_axis(shares, order, sorted_ends - np.where(same, before, 0), axis=1)
    return shares


def _pour(levels: Array, amount: float) -> Array:
    """Return what goes to each level so that the lowest, filled up, are equal."""
    order = np.argsort(levels, kind="stable")
    ascending = levels[order]
    count = np.arange(1, len(levels) + 1)
    surfaces = (amount + np.cumsum(ascending)) / count
    surface = surfaces[np.nonzero(surfaces >= ascending)[0][-1]]
    return np.maximum(surface - levels, 0.0)
