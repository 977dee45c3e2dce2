"""Figures of a run that a compiled program does not show, stated by the layer that knows them.

A traced program shows capacities, grids and conditions; how many rows hold something, which blocks are visited, how
often a loop turns and what a kernel reads of the memory that it is given is known to the layer, or only at run time.
The name of a scope carries it to where FLOPs, bytes and turns are counted (`mesh.cost.arithmetic`, `traffic`, `hlo`).
"""

import re
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

_SHARE, _POINTS = re.compile(r"filled_1_of_([\d.]+)"), re.compile(r"visits_(\d+)_points(?:_of_(\w+))?")
_COST = re.compile(r"kernel_of_(\d+)_flops_and_(\d+)_bytes")
_TURNS = re.compile(r"turns_(\d+)_times(?:/while)?$")  # name of the loop itself, not of loops in its body


class KernelCost(NamedTuple):
    """The work of one call of a kernel on one device."""

    flops: int
    bytes: int  # read from and written to HBM


def filled(one_of: float) -> AbstractContextManager[Any]:
    """Enter a scope in which one of so many rows of every ragged product is expected to be filled."""
    return jax.named_scope(f"filled_1_of_{one_of:g}")


def visits(points: int, kernel: str | None = None) -> AbstractContextManager[Any]:
    """Enter a scope in which every kernel, or the one in whose scope this name stands, computes at so many points."""
    return jax.named_scope(f"visits_{points}_points" if kernel is None else f"visits_{points}_points_of_{kernel}")


def costs(flops: int, bytes: int) -> AbstractContextManager[Any]:
    """Enter a scope in which every kernel does so many FLOPs and moves so many bytes, on one device."""
    return jax.named_scope(f"kernel_of_{flops}_flops_and_{bytes}_bytes")


def turns(times: int) -> AbstractContextManager[Any]:
    """Enter a scope whose loop is expected to turn so often, where that depends on data."""
    return jax.named_scope(f"turns_{times}_times")


def filled_share(name_stack: str) -> float:
    """Return the share of an operation's rows that is filled, by its name stack; 1 outside of `filled`."""
    found = _SHARE.findall(name_stack)
    return 1 / float(found[-1]) if found else 1.0


def visited_points(name_stack: str) -> int | None:
    """Return the grid points that a kernel visits, by its name stack; None outside of `visits`."""
    scopes = _POINTS.sub("", name_stack)
    found = [(int(points), kernel) for points, kernel in _POINTS.findall(name_stack) if kernel in scopes]
    own = [points for points, kernel in found if kernel] or [points for points, _ in found]
    return own[-1] if own else None


def kernel_cost(name_stack: str) -> KernelCost | None:
    """Return the work of a kernel, by its name stack; None outside of `costs`."""
    found = _COST.findall(name_stack)
    return KernelCost(*map(int, found[-1])) if found else None


def expected_turns(name_stack: str) -> int | None:
    """Return the iterations of a loop, by its name stack; None outside of `turns`."""
    found = _TURNS.search(name_stack)
    return int(found[1]) if found else None
