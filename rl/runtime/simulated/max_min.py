"""Max-min fair sharing of links among flows, by progressive filling (Bertsekas & Gallager, Data Networks, 6.5.2).

All rates grow together until a link is full or a flow has its own limit; what is bounded keeps its rate, the others
grow on. No flow can then have more without a flow of at most its rate having less.
"""

import math
from collections.abc import Mapping, Sequence

from mesh import UserError, did_you_mean

Path = Sequence[str]  # links of a flow


def max_min_rates(
    paths: Sequence[Path], capacities: Mapping[str, float], limits: Sequence[float] | None = None
) -> list[float]:
    """Return the rate of each flow, in the unit of the capacities.

    Args:
        paths: links of each flow; a link that it passes twice counts twice.
        capacities: capacity of each link, at least 0.
        limits: rate that each flow can have alone; None: any.

    Raises:
        UserError: a path names a link that there is not, or passes none and has no limit.

    >>> from rl.runtime.simulated.max_min import max_min_rates
    >>> max_min_rates([["a"], ["a", "b"], ["b"]], {"a": 10.0, "b": 4.0})
    [8.0, 2.0, 2.0]
    """
    limits = [math.inf] * len(paths) if limits is None else limits
    check_paths(paths, capacities, limits)
    rates, free = [0.0] * len(paths), set(range(len(paths)))
    left = {link: capacities[link] for path in paths for link in path}
    crossing = dict.fromkeys(left, 0)
    for path in paths:
        for link in path:
            crossing[link] += 1
    level = 0.0  # rate of all that are free
    while free:
        grows = min((left[link] / count for link, count in crossing.items() if count), default=math.inf)
        grows = max(0.0, min(grows, min(limits[n] for n in free) - level))
        level += grows
        for link, count in crossing.items():
            left[link] -= grows * count
        full = {link for link, count in crossing.items() if count and left[link] <= 1e-12 * capacities[link]}
        bounded = [n for n in free if limits[n] <= level or not full.isdisjoint(paths[n])]
        for n in bounded:
            rates[n] = min(level, limits[n])
            free.discard(n)
            for link in paths[n]:
                crossing[link] -= 1
    return rates


def check_paths(paths: Sequence[Path], capacities: Mapping[str, float], limits: Sequence[float]) -> None:
    """Refuse flows that have no path, and links that are none (UserError)."""
    for path, limit in zip(paths, limits, strict=True):
        for link in path:
            if link not in capacities:
                raise UserError(f"network: there is no link {link!r}{did_you_mean(link, capacities)}")
            if not capacities[link] >= 0:
                raise UserError(f"network: link {link!r} has {capacities[link]:g}; expected bytes a second, 0 or more")
        if not path and math.isinf(limit):
            raise UserError("network: a flow without a path; expected links, or a limit of its own")
