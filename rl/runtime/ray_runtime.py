"""Every role in a process of its own, as Ray actors; Ray is started inside the command unless a cluster is named.

Placement, restarts and logs are Ray's. This file starts the roles in order, watches the workers' loops, kills one when
the experiment asks for it, and takes everything down at the end.
"""

import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

if "RAY_ADDRESS" not in os.environ:
    # Ray reads this when it is imported. Unless it is off, Ray replaces 127.0.0.1 by an address of the network and
    # listens there; the switch is named after the systems on which off is the default.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray  # noqa: E402
from ray.exceptions import RayActorError, RayTaskError  # noqa: E402

from axlearn_like.config_text import to_text  # noqa: E402
from axlearn_like.metrics import read_rows  # noqa: E402
from axlearn_like.run_directory import EventLog, RunDirectory  # noqa: E402
from mesh import UserError  # noqa: E402
from rl.experiment import RLExperiment  # noqa: E402
from rl.runtime.ray_actors import RemoteRole, RoleHost  # noqa: E402

NEEDED_BYTES = 2 << 30  # Ray itself and one small JAX process a role


def run_ray(
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
) -> int:
    """Update until the last step or until `stop()`; returns the steps completed."""
    with ray_session():
        fleet = Fleet(experiment, run)
        try:
            return fleet.run(stop, on_step)
        finally:
            fleet.close()


@contextmanager
def ray_session() -> Iterator[None]:
    """Ray for the length of the block: `RAY_ADDRESS`'s cluster, or one of our own on loopback."""
    free = psutil.virtual_memory().available
    if free < NEEDED_BYTES and not os.environ.get("RAY_ADDRESS"):
        raise UserError(
            f"not enough free memory to start Ray: {free / 2**30:.1f} GiB available, "
            f"{NEEDED_BYTES / 2**30:.0f} GiB needed; close something, or use --runtime inprocess"
        )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        ray.init(
            num_cpus=64,  # roles are processes, not cores: placement on one machine is not Ray's to limit
            include_dashboard=False,
            object_store_memory=256 << 20,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


class Fleet:
    """The actors of one run."""

    def __init__(self, experiment: RLExperiment, run: RunDirectory):
        self._cfg, self._run = experiment.cfg, run
        self._events = EventLog(run.events_path)
        self._text = to_text(experiment.cfg)
        self.server = self._start("parameter_server", "parameter-server", token=secrets.token_hex(16))
        self.controller = self._start("controller", "controller")
        self.verifier = self._start("verifier", "verifier")
        self._peers = {
            "controller": self.controller,
            "verifier": self.verifier,
            "endpoint": result(self.server.endpoint.remote()),
        }
        self.trainer = self._start("trainer", "trainer", **self._peers)
        self.workers = {
            name: self._start("worker", name, **self._peers)
            for name in (f"worker-{i}" for i in range(experiment.cfg.workers))
        }

    def run(self, stop: Callable[[], bool], on_step: Callable[[int], None]) -> int:
        """Watch until the trainer's loop returns."""
        loops: dict[Any, str] = {a.run_worker.remote(): n for n, a in self.workers.items()}
        training = self.trainer.run_trainer.remote()
        loops[training] = "trainer"
        kill_at = self._kill_step()
        step, asked = -1, False
        while True:
            done, _ = ray.wait(list(loops), timeout=0.25)
            for loop in done:
                name = loops.pop(loop)
                again = self._ended(name, loop)
                if again is not None:
                    loops[again] = name
                    training = again if name == "trainer" else training
                elif name == "trainer":
                    return result(loop)
            rows = read_rows(self._run.metrics_path) if self._run.metrics_path.exists() else []
            step = max((row["step"] for row in rows if row["phase"] == "rl"), default=0)
            on_step(step)
            if kill_at is not None and step >= kill_at:
                self._kill(f"worker-{self._cfg.workers - 1}", step)
                kill_at = None
            if stop() and not asked:
                asked = True
                self.trainer.stop.remote()

    def close(self) -> None:
        """Stop the workers, then end all actors; nothing is left running."""
        actors = [*self.workers.values(), self.trainer, self.verifier, self.controller, self.server]
        try:
            RemoteRole("controller", self.controller, patience=2.0).stop()
            RemoteRole("verifier", self.verifier, patience=2.0).close()
        except (UserError, RayActorError):
            pass  # already gone
        for actor in actors:
            ray.kill(actor)

    def _start(self, kind: str, name: str, **peers: Any) -> Any:
        actor = ray.remote(RoleHost).options(
            name=f"{name}-{self._run.path.name}",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=32,
            runtime_env={"env_vars": _environment(kind)},
        )
        return actor.remote(kind, name, self._text, str(self._run.path), peers)

    def _ended(self, name: str, loop: Any) -> Any | None:
        """A loop returned or its actor died: the new loop of a restarted actor, or None if it ended well."""
        try:
            result(loop)
            return None
        except RayActorError:
            self._events.append("driver", "died", target=name)
        if name == "trainer":
            return self.trainer.run_trainer.remote()
        RemoteRole("controller", self.controller).release(name, "worker died")
        return self.workers[name].run_worker.remote()

    def _kill_step(self) -> int | None:
        share = self._cfg.kill_worker_after
        if share is None or self._cfg.workers == 0:
            return None
        killed = [r for r in read_rows(self._run.events_path) if r.get("event") == "kill"]
        return None if killed else max(1, round(share * self._cfg.num_steps))

    def _kill(self, name: str, step: int) -> None:
        pid = ray.get(self.workers[name].pid.remote())
        self._events.append("driver", "kill", target=name, pid=pid, step=step)
        os.kill(pid, signal.SIGKILL)


def result(reference: Any) -> Any:
    """`ray.get`, with the error that the role itself raised instead of Ray's wrapping of it."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.as_instanceof_cause() from None


def _environment(kind: str) -> dict[str, str]:
    """A role without device work must not open the accelerator; JAX processes share the cores of a machine."""
    names = ("JAX_PLATFORMS", "XLA_FLAGS", "AXL_COMPILATION_CACHE")
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    if kind not in ("trainer", "worker"):
        inherited["JAX_PLATFORMS"] = "cpu"
    return inherited
