"""Adoption: roles that a killed driver has left at work are found by their names, and followed by the next driver."""

import contextlib
import secrets
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from axlearn_like.run.directory import RunDirectory
from rl.experiment import RLExperiment
from rl.runtime.node.drivers import kept_ray
from rl.runtime.node.start import nodes_of_actors
from rl.runtime.ray.devices.placement import start_actor
from rl.runtime.ray.devices.reservation import Reservation
from rl.runtime.ray.proxies import invoke_beside
from rl.runtime.supervision.role_group import Report, Roles

_ANSWER = 3.0  # seconds for a live process to answer
_SPARE_ANSWER = 0.5  # seconds for spares beyond that


class Starter:
    """Starts the actors of a run, or finds those that a former driver of this command has started.

    Attributes:
        driver: number of this driver; 0: it is no fork of its command.
        namespace: namespace of the actors.
        found: names of actors that were there.
    """

    def __init__(self, cfg: RLExperiment.Config, run: RunDirectory, reservation: Reservation):
        """`reservation`: the devices of trainer, reference and workers."""
        kept = kept_ray()
        self._cfg, self._run, self._reservation, self._kept = cfg, run, reservation, kept
        self.driver, self._token = (0, secrets.token_hex(16)) if kept is None else (kept.number, kept.token)
        self.namespace = f"{run.path.name}-{self._token[:8]}"
        self.found: list[str] = []

    def alive(self) -> list[str]:
        """Return the names of actors that were there and whose raylet lives: others answer when they are back."""
        if not self.found or self._kept is None:
            return self.found
        raylets, nodes = self._kept.told().get("raylets", {}), nodes_of_actors()
        return [name for name in self.found if nodes.get(name) in raylets]

    def __call__(self, kind: str, name: str) -> Any:
        """Return the actor of a process."""
        if self.driver > 1:
            with contextlib.suppress(ValueError):
                actor = ray.get_actor(name, self.namespace)
                self.found.append(name)
                return actor
        raylets = 0 if self._kept is None else self._kept.told().get("sides", 1)
        known = {"token": self._token, "namespace": self.namespace, "raylets": raylets}
        return start_actor(self._cfg, self._run, kind, name, self._reservation.slot(name), **known)


def adopt(roles: Roles, starter: Starter) -> dict[str, Report]:
    """Give actors that were found the names that they have now; returns what they do, by that name."""
    actors = {**roles.services, **roles.loops}
    asked = {name: invoke_beside(actors[name], "report", starter.driver) for name in starter.alive()}
    # A spare that prepares itself answers late, and is asked to prepare itself again.
    for timeout, some in ((_ANSWER, asked.keys() - roles.spares.keys()), (_SPARE_ANSWER, asked.keys())):
        if pending := [asked[name] for name in some]:
            ray.wait(pending, num_returns=len(pending), timeout=timeout)
    reports: dict[str, Report] = {}
    for name, reference in asked.items():
        with contextlib.suppress(RayActorError, GetTimeoutError):  # one that starts again is followed like a new one
            reports[name] = ray.get(reference, timeout=0.01)
    places = _places(roles, reports)
    for now, first in places.items():
        if now != first:
            roles.place(now, actors[first])
    found = {now: reports[first] for now, first in places.items() if first in reports}
    for group in {id(one): one for one in roles.groups.values()}.values():
        at_work = [name for name in group.names if name in found and found[name].runs]
        if 0 < len(at_work) < len(group.names):  # the others have died: these wait for them in vain
            for name in at_work:
                ray.kill(roles.loops[name], no_restart=False)
                del found[name]
    for now, report in found.items():
        roles.note_report(now, report.incarnation, report.prepared_as, runs=report.runs)
    return {name: report for name, report in reports.items() if name in roles.services} | found


def _places(roles: Roles, reports: dict[str, Report]) -> dict[str, str]:
    """Return names -> first names of the actors that have them now; those at work come first, then those prepared.

    A process that died when a spare had taken its place has the name of its first start, which the spare has now.
    """
    taken: dict[str, str] = {}
    for first, report in sorted(reports.items(), key=lambda one: (not one[1].runs, not one[1].prepared_as)):
        if first in roles.loops:
            taken.setdefault(report.name, first)
    for kind in sorted({name.partition("-")[0] for name in roles.loops}):
        alike = [name for name in roles.loops if name.partition("-")[0] == kind]
        free = [name for name in alike if name not in taken]
        taken |= zip(free, [first for first in alike if first not in taken.values()], strict=True)
    return taken
