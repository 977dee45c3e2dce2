"""Placement by Maximum Rank Overlap (Lazarus, arXiv 2407.04656, 4.2): experts survive failures of hosts or slices."""

import numpy as np

from axlearn_like.layers.moe.placement.plan import Array
from axlearn_like.layers.moe.placement.table import fill, put


def place_to_survive(replicas: Array, domains: int, slots: int) -> Array:
    """Return `max_rank_overlap`, or `spread` where groups of experts are not whole and fewer failures would lose one.

    With whole groups (`slots` divides the experts) overlap survives most often, whatever the number of failures. With
    others no placement need be best for all numbers: the first number of failures that can lose an expert decides.
    """
    overlap = max_rank_overlap(replicas, domains, slots)
    if len(replicas) % slots == 0:
        return overlap
    dealt = spread(replicas, domains, slots)
    found = [losing_sets(table, len(replicas)) for table in (overlap, dealt)]
    if found[1] >= found[0]:
        return overlap
    if np.any(dealt < 0):
        fill(dealt, np.sum(dealt >= 0, axis=1), np.zeros(domains), 1 / replicas)
    return dealt


def max_rank_overlap(replicas: Array, domains: int, slots: int) -> Array:
    """Return int [domains, slots]: neighbours in popularity share the domains of the least popular of them.

    Groups of `slots` experts, least popular first; all domains of a group hold all of it, so what is lost is lost
    together. The last group has the domains that are left, and slots left over take further replicas (Lazarus, 4.2).
    """
    order = np.argsort(replicas, kind="stable")
    table, used = np.full((domains, slots), -1, np.int64), np.zeros(domains, np.int64)
    left, first = replicas.copy(), 0
    for start in range(0, len(order), slots):
        group = order[start : start + slots]
        last = start + slots >= len(order)
        own = np.arange(first, domains if last else first + int(replicas[group[0]]))
        for expert in group:
            some = own[: left[expert]]
            table[some, used[some]] = expert
            used[some] += 1
            left[expert] -= len(some)
        first += len(own)
    even = np.zeros(domains)
    for expert in order[::-1]:
        if left[expert] > 0:
            put(table, used, even, expert, int(left[expert]), np.zeros(len(replicas)))
    fill(table, used, even, 1 / replicas)
    return table


def spread(replicas: Array, domains: int, slots: int) -> Array:
    """Return int [domains, slots], one replica after the other dealt to one domain after the other; -1: none."""
    dealt = np.full(domains * slots, -1, np.int64)
    dealt[: replicas.sum()] = np.repeat(np.arange(len(replicas)), replicas)
    return dealt.reshape(slots, domains).T


def losing_sets(table: Array, num_experts: int) -> tuple[int, ...]:
    """Return how many sets of so many domains hold all copies of an expert, of 0, 1, ... domains: fewer are better."""
    held = np.zeros((num_experts, len(table)), bool)
    domains, slots = np.nonzero(table >= 0)
    held[table[domains, slots], domains] = True
    return tuple(np.bincount(np.unique(held, axis=0).sum(axis=1), minlength=len(table) + 1).tolist())
