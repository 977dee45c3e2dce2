"""Expected use of capacity that a program reserves for the worst case, stated by the layer that reserves it.

A traced program shows capacities and blocks; how many of them hold rows, or are visited, is known to the layer, or only
at run time. The name of a scope carries it to where FLOPs are counted (see `mesh.cost.arithmetic`).
"""

import re
from contextlib import AbstractContextManager
from typing import Any

import jax

_SHARE, _POINTS = re.compile(r"filled_1_of_(\d+)"), re.compile(r"visits_(\d+)_points")


def filled(one_of: int) -> AbstractContextManager[Any]:
    """Enter a scope in which one of so many rows of every ragged product is expected to be filled."""
    return jax.named_scope(f"filled_1_of_{one_of}")


def visits(points: int) -> AbstractContextManager[Any]:
    """Enter a scope in which every kernel computes at so many points of its grid."""
    return jax.named_scope(f"visits_{points}_points")


def filled_share(name_stack: str) -> float:
    """Return the share of an operation's rows that is filled, by its name stack; 1 outside of `filled`."""
    found = _SHARE.findall(name_stack)
    return 1 / int(found[-1]) if found else 1.0


def visited_points(name_stack: str) -> int | None:
    """Return the grid points that a kernel visits, by its name stack; None outside of `visits`."""
    found = _POINTS.findall(name_stack)
    return int(found[-1]) if found else None
