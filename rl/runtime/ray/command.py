"""The command of a run, where it outlives its driver and Ray: it kills by a trace, and reports the driver's deaths."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh.devices import find_devices
from mesh.files.bucket import bucket_url
from rl.experiment import RLExperiment
from rl.fleet.requests import role_requests
from rl.runtime.node.drivers import run_drivers
from rl.runtime.node.orphans import end_orphans
from rl.runtime.node.warm import teach
from rl.runtime.ray.fault_injection import FaultInjection
from rl.runtime.ray.run_logs import RunLogs
from rl.runtime.ray.session import keep_session
from rl.runtime.simulated.failures import Failure, Faults
from rl.runtime.supervision.actors import Say


def begin_drivers(
    cfg: RLExperiment.Config, run_dir: str | Path, trace: Sequence[Failure] = (), say: Say = print
) -> Sequence[Failure]:
    """Divide this process into a command and its driver, where roles run on this machine alone; returns in drivers.

    Args:
        run_dir: the run directory; one in a bucket has copies that a driver must not leave to another.
        trace: what the command kills.

    Returns:
        What the driver has to kill itself: all of the trace, if this process is not divided, else nothing.

    Raises:
        UserError: the trace has what cannot be killed.
    """
    if os.environ.get("RAY_ADDRESS") or bucket_url(run_dir):
        return trace
    importlib.import_module("rl.runtime.ray.runtime")  # once for all drivers
    teach([name for name, module in sys.modules.items() if _is_package(name, module)])
    faults = Faults(None, list(trace))
    faults.check(cfg.workers, kept=True)
    observer = _Observer(cfg, RunDirectory.attach(run_dir), faults, say)
    # Two raylets would both give the same devices away.
    raylets = 2 if cfg.standby and not role_requests(cfg, find_devices()) else 1
    keep = lambda kept: keep_session(kept, raylets, observer.replaced)  # noqa: E731
    return () if run_drivers(keep, observer) else trace


def _is_package(name: str, module: Any) -> bool:
    """Return True for an installed package, which imports the same anywhere."""
    return "." not in name and "site-packages" in (getattr(module, "__file__", None) or "") and name != "ray"


class _Observer:
    def __init__(self, cfg: RLExperiment.Config, run: RunDirectory, faults: Faults, say: Say):
        self._run, self._faults, self._say = run, faults, say
        self._logs = RunLogs(cfg, run)
        self._injection = FaultInjection(run, workers=cfg.workers, faults=faults)

    @property
    def step(self) -> int:
        self._logs.updated()
        return self._logs.step

    def begin_ray(self) -> None:
        """End roles that have lost their Ray."""
        end_orphans(self._run)

    def look(self, driver: int, ray: Mapping[str, Any]) -> bool:
        """Kill what has to be killed now; returns False when nothing is left of the trace."""
        if not self._faults.trace:
            return False
        self._logs.new_events()
        raylets = {f"raylet-{n}": pid for n, pid in enumerate(ray.get("raylets", {}).values())}
        self._injection.inject(self.step, {**self._logs.pids, "driver": driver, **raylets}, {})
        return True

    def replaced(self, number: int, raylet: int, following: int) -> None:
        """Report the death of a raylet beside which another one lives."""
        log, name = EventLog(self._run.events_path), f"raylet-{number}"
        log.append("driver", "died", target=name, pid=raylet)
        log.append(name, "start", pid=following)
        again = "what it had started is taken over, or starts again"
        self._say(f"Ray's {name} (pid {raylet}) died at update {self.step}; {again}")

    def died(self, driver: int, cause: str) -> None:
        """Report the death of a driver."""
        EventLog(self._run.events_path).append("driver", "died", target="driver", pid=driver)
        self._say(f"driver (pid {driver}) died ({cause}) at update {self.step}; the roles work on, and another follows")
