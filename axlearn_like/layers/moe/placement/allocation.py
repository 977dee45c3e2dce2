"""Replicas of experts by load, in whole numbers."""

import numpy as np

from axlearn_like.layers.moe.placement.plan import Array


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


def hold_threshold(threshold: int, num_experts: int, slots: int, domains: int) -> int:
    """Return the threshold that can be held: as asked for, but at most slots / experts, and at most the domains."""
    return max(1, min(threshold, slots // num_experts, domains))


def allocate(loads: Array, slots: int, most: int, threshold: int = 1) -> Array:
    """Return int [experts], replicas in proportion to loads: never fewer for a more popular expert, `slots` in all.

    From the least popular on, each gets its share of the slots left, rounded down, but `threshold` at least (Lazarus,
    equation 1). What is above `most`, the devices on which copies could be, goes to the next popular ones; if all have
    that many, slots are left over.
    """
    loads = np.maximum(np.asarray(loads, np.float64), 0)
    order = np.argsort(loads, kind="stable")
    rest = np.cumsum(loads[order][::-1])[::-1]
    found, left = np.zeros(len(loads), np.int64), slots
    for place, expert in enumerate(order):
        share = loads[expert] / rest[place] if rest[place] > 0 else 1 / (len(loads) - place)
        found[expert] = max(int(left * share + 1e-9), threshold)
        left -= int(found[expert])
    for expert in order[::-1]:  # rounding left some, or copies would be twice on a device
        left += max(0, int(found[expert]) - most)
        found[expert] = min(found[expert], most)
        more = min(left, most - int(found[expert]))
        found[expert], left = found[expert] + more, left - more
    return found
