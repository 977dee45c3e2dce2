"""Schedules of operations on resources, and by a model of events the time that they take.

A schedule is an order of operations on each resource (a group of devices, a direction of a link), and what each
operation waits for. An operation begins when its resource is free and what it waits for is done. Pure functions.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from mesh.errors import UserError

Name = tuple[Hashable, ...]


class Op(NamedTuple):
    """One operation.

    Attributes:
        name: its kind, layer and microbatch.
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
