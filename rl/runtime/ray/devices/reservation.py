"""Devices of a run in its Ray cluster: reserved for all roles before the first starts, and given back at the end.

Each process of a role has a bundle of a placement group, to which it comes back when it restarts. The hosts of a TPU
slice belong together and have an order, which libtpu knows: process i of the trainer is on host i.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import SlicePlacementGroup

from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.fleet.requests import RoleRequest
from rl.protocol.timeouts import Timeouts, Waits
from rl.runtime.node.drivers import kept_ray
from rl.runtime.ray.devices.capacity import (
    SLICE,
    WORKER_ID,
    accelerator_resource,
    accelerators,
    check_capacity,
    described_slices,
    machine_selector,
    own_machine,
    ray_generation,
    role_selector,
)
from rl.runtime.supervision.actors import Say

_LITTLE = 0.001  # amount of the resource that names a host's GPU model, same as in Ray's `accelerator_type`
_HEAD_WAIT = 5.0  # seconds of one attempt to find a slice, between two looks at `stop`
_POLL = 0.5


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one process: a bundle of a placement group, or anywhere."""

    request: RoleRequest
    group: Any = None
    bundle: int = 0

    def options(self) -> dict[str, Any]:
        """Return the options of an actor that starts there."""
        if self.group is None:
            return {}
        each = self.request.each
        asked = {"num_gpus": each} if self.request.kind == "GPU" else {"resources": {"TPU": each}}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle), **asked}


class Stopped(Exception):
    """The run was stopped before its devices were free."""


class Reservation:
    """The slots of all processes that have requests, by their names."""

    def __init__(self):
        self._slots: dict[str, Slot] = {}
        self._groups: list[Any] = []  # placement groups of hosts
        self._slices: list[SlicePlacementGroup] = []
        self._taken: set[str] = set()  # slices of described generations

    @classmethod
    def make(
        cls,
        requests: Mapping[str, RoleRequest],
        names: Mapping[str, Sequence[Sequence[str]]],
        wait: "DeviceWait",
    ) -> Self:
        """Reserve all devices, and return when all are there.

        Args:
            names: names of the processes of each instance of each role.
            wait: for devices that others use.

        Raises:
            UserError: the cluster does not have them, or they are not free in time. Stopped: the run was stopped.
        """
        check_capacity(requests.values(), ray.nodes())
        made = cls()
        try:
            for request in sorted(requests.values(), key=_turn):
                for group in made._reserve(request, names[request.role], wait):
                    wait.until(partial(group.wait, 1), request.role)
            for one in made._slices:
                one.release_head_pgs()
        except BaseException:
            made.release()
            raise
        return made

    def slot(self, name: str) -> Slot | None:
        """Return the place of a process; None if its role has no request."""
        return self._slots.get(name)

    def release(self) -> None:
        """Give all devices back."""
        for one in self._slices:
            one.shutdown()
        for group in self._groups:
            remove_placement_group(group)
        self._slots, self._groups, self._slices = {}, [], []

    def _reserve(self, request: RoleRequest, instances: Sequence[Sequence[str]], wait: "DeviceWait") -> list[Any]:
        """Ask for the devices of a role; returns the placement groups, which are there when all of them are."""
        groups: list[Any] = []
        for number, instance in enumerate(instances):
            if request.kind == "CPU":
                self._slots |= {name: Slot(request) for name in instance}
                continue
            several = request.topology is not None and request.hosts_per_slice > 1
            groups.append(self._reserve_slices(request, wait) if several else self._reserve_hosts(request, number))
            self._slots |= {name: Slot(request, groups[-1], bundle) for bundle, name in enumerate(instance)}
        return groups

    def _reserve_hosts(self, request: RoleRequest, number: int) -> Any:
        """Reserve hosts for an instance, whose number is given."""
        bundle = {"TPU" if request.topology is not None else "GPU": request.each}
        selector = role_selector(request.role) if request.topology is None else machine_selector(request)
        if (model := accelerator_resource(request)) is not None:
            bundle[model] = _LITTLE
        selector |= own_machine(request, number, ray.nodes())
        hosts = request.processes
        bundles, selectors = [dict(bundle) for _ in range(hosts)], [selector] * hosts
        self._groups.append(_group(f"{request.role}-{number}", bundles, selectors))
        return self._groups[-1]

    def _reserve_slices(self, request: RoleRequest, wait: "DeviceWait") -> Any:
        """Reserve complete slices; bundle i is host i of its slice, and the hosts of the first slice come first."""
        assert request.topology is not None
        if request.topology.generation.described:
            return self._reserve_described(request, wait)
        own = role_selector(request.role)
        order = [{**own, WORKER_ID: str(i % request.hosts_per_slice)} for i in range(request.processes)]
        found: list[SlicePlacementGroup] = []

        def attempt() -> bool:
            assert request.topology is not None
            try:
                one = SlicePlacementGroup(
                    request.topology.name.partition(":")[2],
                    ray_generation(request.topology),
                    {"CPU": 0, "TPU": request.each},
                    "STRICT_SPREAD",
                    num_slices=request.slices,
                    head_reservation_timeout_s=min(_HEAD_WAIT, wait.left()),
                    bundle_label_selector=order,
                )
            except TimeoutError:
                return False
            found.append(one)
            return True

        try:
            wait.until(attempt, request.role)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"Ray cannot reserve {request.topology} for the {request.role}: {error}") from error
        self._slices += found
        return found[0].placement_group

    def _reserve_described(self, request: RoleRequest, wait: "DeviceWait") -> Any:
        """Reserve slices of a described generation by the labels of their machines; bundle i is host i."""
        free: list[str] = []

        def attempt() -> bool:
            free[:] = [name for name in described_slices(request, ray.nodes()) if name not in self._taken]
            if len(free) < request.slices:
                time.sleep(_POLL)
            return len(free) >= request.slices

        wait.until(attempt, request.role)
        chosen, hosts = free[: request.slices], request.hosts_per_slice
        self._taken.update(chosen)
        own = role_selector(request.role)
        order = [{**own, SLICE: chosen[i // hosts], WORKER_ID: str(i % hosts)} for i in range(request.processes)]
        bundles = [{"TPU": request.each} for _ in order]
        self._groups.append(placement_group(bundles, "STRICT_SPREAD", bundle_label_selector=order))
        return self._groups[-1]


def _group(name: str, bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> Any:
    """Return a placement group: where a driver's command keeps Ray, one that outlives the driver."""
    kept = kept_ray()
    if kept is None:
        return placement_group(bundles, "STRICT_SPREAD", bundle_label_selector=selectors)
    if kept.number > 1:
        with contextlib.suppress(ValueError):
            return get_placement_group(name)
    return placement_group(bundles, "STRICT_SPREAD", name=name, lifetime="detached", bundle_label_selector=selectors)


def _turn(request: RoleRequest) -> tuple[int, bool, float]:
    """Return the place in the order of reservations: several hosts first, GPUs of any model after those of one.

    Larger parts of a host come first, so that those of a TPU begin at a multiple of their size.
    """
    return -request.hosts_per_slice, request.kind == "GPU" and request.model is None, -request.each


class DeviceWait:
    """The wait for devices that others use: reported, limited, and ended by `stop`."""

    def __init__(
        self,
        timeouts: Timeouts.Config,
        say: Say,
        log: EventLog,
        stop: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
    ):
        """`check()` raises if Ray itself has died."""
        self._limit, self._say, self._log, self._stop, self._check = timeouts.restart, say, log, stop, check
        self._waits = Waits(timeouts.warn_after)
        self._waits.begin("devices")
        self._deadline = time.monotonic() + timeouts.restart

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(self._deadline - time.monotonic(), 1.0)

    def until(self, attempt: Callable[[], bool], role: str) -> None:
        """Repeat `attempt`, which waits a little, until a role has its devices (UserError: not in time; Stopped)."""
        while not attempt():
            self._check()
            if self._stop():
                raise Stopped
            free = f"{_free() or 'none'} are free, beside those that this run has"
            if self._waits.due("devices"):
                seconds = round(self._waits.begin("devices"), 1)
                self._log.append("driver", "waiting", who="driver", what=f"devices of the {role}", seconds=seconds)
                self._say(f"waiting {seconds:.0f} s for devices of the {role}; {free}")
            if time.monotonic() > self._deadline:
                raise UserError(
                    f"the Ray cluster has the fleet's devices, but those of the {role} are not free after "
                    f"{self._limit:g} s (timeouts.restart); {free}"
                )


def _free() -> str:
    free = ray.available_resources()
    return ", ".join(f"{free[kind]:g} {name}" for kind, name in (("GPU", "GPUs"), ("TPU", "TPU chips")) if kind in free)


def refuse_accelerators(requests: Mapping[str, RoleRequest]) -> None:
    """Refuse accelerators where no fleet is described: all roles of a host would open all of its own (UserError)."""
    if "trainer" in requests or os.environ.get("JAX_PLATFORMS") == "cpu":
        return
    if found := accelerators(ray.nodes()):
        raise UserError(
            f"the Ray cluster has {found}, and fleet does not say which of them trainer and workers have; expected "
            "--fleet trainer=DEVICES,workers=N x DEVICES, such as trainer=h100:4,workers=4xh100:1 or "
            "trainer=v5p:2x2x2,workers=4xv5p:2x2x1 (or JAX_PLATFORMS=cpu, for CPUs only)"
        )
