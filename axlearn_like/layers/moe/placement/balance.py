"""Balance of devices: replicas of popular experts, and shares of their rows that load all devices nearly the same."""

import numpy as np

from axlearn_like.layers.moe.placement.allocation import allocate, hold_threshold, largest_remainder
from axlearn_like.layers.moe.placement.plan import WHOLE, Array, Domains, ExpertPlan
from axlearn_like.layers.moe.placement.survival import place_to_survive
from axlearn_like.layers.moe.placement.table import fill, put

_SWEEPS = 24  # sweeps of `share_rows`, at most
_CLOSE = 1.005  # ratio of busiest device and mean at which they end


def make_plan(loads: Array, domains: Domains, threshold: int = 1) -> ExpertPlan:
    """Return the plan for loads [layers, experts], each layer's by itself.

    Args:
        loads: rows of each expert, or any multiple of them.
        domains: the devices.
        threshold: domains that each expert is to be in. 1: replicas are placed for balance alone; more: so that experts
            survive the failure of domains (`max_rank_overlap`); lowered as `hold_threshold` says.

    Raises:
        UserError: fewer slots than experts.
    """
    layers, num_experts = loads.shape
    domains.check(num_experts)
    devices, held = (
        domains.count * domains.devices,
        hold_threshold(threshold, num_experts, domains.all_slots, domains.count),
    )
    experts, ends = np.zeros((2, layers, domains.all_slots), np.int32)
    for layer, load in enumerate(np.asarray(loads, np.float64)):
        if held > 1:
            replicas = allocate(load, domains.all_slots, domains.count, held)
            table = split_domains(
                place_to_survive(replicas, domains.count, domains.devices * domains.slots), load, domains
            )
        else:
            table = balanced(load, allocate(load, domains.all_slots, devices), devices, domains.slots)
        experts[layer], ends[layer] = table.reshape(-1), share_rows(table, load).reshape(-1)
    return ExpertPlan(experts, ends, devices, held)


def balanced(load: Array, replicas: Array, devices: int, slots: int) -> Array:
    """Return int [devices, slots]: experts from the most loaded replica on, each on the least loaded devices."""
    table = np.full((devices, slots), -1, np.int64)
    loads, used = np.zeros(devices), np.zeros(devices, np.int64)
    each = load / replicas
    for expert in np.argsort(-each, kind="stable"):
        put(table, used, loads, expert, int(replicas[expert]), each)
    fill(table, used, loads, each)
    return table


def split_domains(table: Array, load: Array, domains: Domains) -> Array:
    """Return int [devices, slots] of a table of domains: each one's experts on its devices, by load."""
    each = load / np.bincount(table.reshape(-1), minlength=len(load))
    found = np.full((domains.count, domains.devices, domains.slots), -1, np.int64)
    for row, devices in zip(table, found, strict=True):
        loads, used = np.zeros(domains.devices), np.zeros(domains.devices, np.int64)
        for expert in row[np.argsort(-each[row], kind="stable")]:
            put(devices, used, loads, int(expert), 1, each)
        fill(devices, used, loads, each)
    return found.reshape(-1, domains.slots)


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


def _pour(levels: Array, amount: float) -> Array:
    """Return what goes to each level so that the lowest, filled up, are equal."""
    order = np.argsort(levels, kind="stable")
    ascending = levels[order]
    count = np.arange(1, len(levels) + 1)
    surfaces = (amount + np.cumsum(ascending)) / count
    surface = surfaces[np.nonzero(surfaces >= ascending)[0][-1]]
    return np.maximum(surface - levels, 0.0)
