"""How much of what a program reserves for the worst case is expected to be used, said by the layer that made it.

A traced program shows places and blocks; which of them hold rows, or are visited, is known to the layer or only when it
runs. The name of a scope carries what is known to where FLOPs are counted (see `mesh.cost.arithmetic`).
"""

import re
from contextlib import AbstractContextManager
from typing import Any

import jax

_SHARE, _POINTS = re.compile(r"filled_1_of_(\d+)"), re.compile(r"visits_(\d+)_points")


def filled(one_of: int) -> AbstractContextManager[Any]:
    """Within it, one of so many rows of every ragged product is expected to be one."""
    return jax.named_scope(f"filled_1_of_{one_of}")


def visits(points: int) -> AbstractContextManager[Any]:
    """Within it, every kernel does something at so many points of its grid."""
    return jax.named_scope(f"visits_{points}_points")


def filled_share(name_stack: str) -> float:
    """Of an operation's rows, by its name stack; 1 outside of `filled`."""
    found = _SHARE.findall(name_stack)
    return 1 / int(found[-1]) if found else 1.0


def visited_points(name_stack: str) -> int | None:
    """By an operation's name stack; None outside of `visits`."""
    found = _POINTS.findall(name_stack)
    return int(found[-1]) if found else None
