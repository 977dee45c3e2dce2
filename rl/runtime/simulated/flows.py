"""Flows under the virtual clock: transfers and computations that share links and cores, max-min fairly.

A rate changes when a flow begins or ends. Only the flows that share links with it, directly or through others, are
computed again. Cores are a link of one second of work a second for each, of which a process takes some.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mesh import UserError, did_you_mean
from rl.runtime.simulated.virtual_clock import SimulatedProcess, VirtualClock


class LinkDown(RuntimeError):
    """A link of a flow has gone down."""


_LATE = 1e-6  # seconds by which a flow may end too early, for times are rounded


@dataclasses.dataclass(eq=False, slots=True)
class _Flow:
    """A flow; `left` is as of `since`."""

    path: tuple[str, ...]
    size: float
    limit: float
    left: float
    since: float
    owner: SimulatedProcess | None
    rate: float = 0.0
    timer: Any = None
    over: bool = False
    cut: bool = False


class Flows:
    """The flows on links of these capacities, units a second."""

    def __init__(self, clock: VirtualClock, capacities: Mapping[str, float]):
        self._clock, self.capacities = clock, dict(capacities)
        self._on: dict[str, dict[_Flow, None]] = {}  # link -> its flows
        self.busy: dict[str, float] = {}  # link -> units that have passed

    def pass_through(self, path: Sequence[str], size: float, limit: float = math.inf) -> float:
        """Wait until so many units have passed; returns the seconds (UserError: no such path; LinkDown: a link is)."""
        began = self._clock()
        if size <= 0:
            check_paths([path], self.capacities, [limit])
            return 0.0
        flow = self._begin(path, size, limit, self._clock.current)
        while not flow.over:
            self._clock.park(None)
        if flow.cut:
            raise LinkDown(f"a link of {' -> '.join(path)} is down")
        return self._clock() - began

    def send(self, path: Sequence[str], size: float, limit: float = math.inf) -> None:
        """Let so many units pass for which nobody waits (UserError: there is no such path)."""
        if size > 0:
            self._begin(path, size, limit, None)

    def _begin(self, path: Sequence[str], size: float, limit: float, owner: SimulatedProcess | None) -> _Flow:
        check_paths([path], self.capacities, [limit])
        flow = _Flow(tuple(path), size, limit, size, self._clock(), owner)
        for link in flow.path:
            self._on.setdefault(link, {})[flow] = None
        self._share(flow)
        return flow

    def cut(self, link: str) -> None:
        """End the flows of a link whose host is lost; who waits for them learns it."""
        for flow in list(self._on.get(link, {})):
            flow.cut = True
            self._end(flow)

    def drop(self, group: str) -> None:
        """End the flows of a group of processes that is killed."""
        gone = {one for flows in self._on.values() for one in flows if one.owner and one.owner.group == group}
        for flow in gone:
            self._end(flow)

    def _together(self, first: _Flow) -> list[_Flow]:
        """Return the flows whose rates depend on this one's."""
        found, links, new = {first: None}, set[str](), [first]
        while new:
            for link in new.pop().path:
                if link not in links:
                    links.add(link)
                    others = [one for one in self._on.get(link, {}) if one not in found]
                    found |= dict.fromkeys(others)
                    new += others
        return [flow for flow in found if not flow.over]

    def _share(self, changed: _Flow) -> None:
        """Compute the rates again that the beginning or end of a flow changes."""
        flows = self._together(changed)
        rates = max_min_rates([flow.path for flow in flows], self.capacities, [flow.limit for flow in flows])
        now = self._clock()
        for flow, rate in zip(flows, rates, strict=True):
            flow.left -= flow.rate * (now - flow.since)
            flow.since = now
            if rate != flow.rate or flow.timer is None:
                flow.rate = rate
                if flow.timer is not None:
                    flow.timer.cancel()
                if rate > 0:
                    flow.timer = self._clock.timer(max(flow.left, 0.0) / rate, lambda flow=flow: self._arrive(flow))

    def _arrive(self, flow: _Flow) -> None:
        left = flow.left - flow.rate * (self._clock() - flow.since)
        assert left <= _LATE * flow.rate, "a flow ends when all of it has passed"
        self._end(flow)

    def _end(self, flow: _Flow) -> None:
        flow.over = True
        if flow.timer is not None:
            flow.timer.cancel()
        passed = flow.size - max(flow.left - flow.rate * (self._clock() - flow.since), 0.0)
        for link in flow.path:
            self._on[link].pop(flow, None)
            self.busy[link] = self.busy.get(link, 0.0) + passed
        self._share(flow)
        if flow.owner is not None:
            self._clock.wake(flow.owner)


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

    >>> from rl.runtime.simulated.flows import max_min_rates
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
