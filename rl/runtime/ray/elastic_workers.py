"""Elastic workers: rollout workers that join a run from outside and leave it at any time (`axl worker RUN_DIR`).

The driver writes the address of its Ray cluster and the namespace of its actors into the run directory. A user who can
read that file, on any machine of the cluster, can join. An elastic worker is a plain process that runs a worker's loop.
"""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import psutil
import ray

from axlearn_like.config import from_text
from axlearn_like.operations.profiler import ProfileSignal
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import UserError, make_mesh
from rl.experiment import RLExperiment
from rl.parameter_server.client import ParameterServerClient
from rl.runtime.cluster_file import cluster_path, read_cluster
from rl.runtime.policies.roles import PolicyRoles
from rl.runtime.ray.heartbeat import Heartbeat
from rl.runtime.ray.proxies import RoleGone, Services, connect_services
from rl.runtime.ray.session import ray_session
from rl.runtime.ray.shutdown import GracefulShutdown
from rl.runtime.supervision.actors import Say
from rl.runtime.supervision.names import server_names


class Joins(Protocol):
    """A rollout worker, or what else takes part in a run from outside."""

    @property
    def abandon(self) -> Callable[[], object]:
        """Free what it holds, at once: for another thread."""
        ...

    @property
    def run(self) -> Callable[[Callable[[], bool]], None]:
        """Take part until the run is over, or until a function says so."""
        ...


def run_elastic_worker(
    run_dir: Path,
    name: str | None = None,
    say: Say = print,
    make: Callable[[RLExperiment.Config, ParameterServerClient], Joins] | None = None,
) -> None:
    """Work for the run in `run_dir` until it is over, or until SIGTERM or Ctrl-C.

    Args:
        say: called with one line when it has joined, and when it leaves.
        make: makes what joins from the run's config and its parameter server; None: a rollout worker.

    Raises:
        UserError: no run is active there, or its Ray cluster cannot be reached from here.
    """
    run = RunDirectory.attach(run_dir)
    cluster = read_cluster(run)
    if _has_ended(cluster["address"]):
        raise _lost_driver(run)  # Ray would look for it for minutes
    name = name or f"elastic-{socket.gethostname()}-{os.getpid()}"
    experiment = from_text(run.read_config()).build()
    with ray_session(cluster["address"]):
        actors = _actors(run, cluster["namespace"], experiment.cfg)

        def joins(services: Services) -> Joins:
            began = psutil.Process().create_time()
            if experiment.cfg.policies:
                if make is not None:
                    raise UserError(f"{run_dir} trains several policies; expected a run with one")
                roles = PolicyRoles(experiment, run)
                return roles.make_worker(name, services.controller, services.weights, services.verifiers, began)
            weights = services.weights[""]
            if make is not None:
                return make(experiment.cfg, weights)
            return experiment.make_worker(name, run, services.controller, weights, services.verifiers[""], began=began)

        _work(experiment.cfg, run, name, actors, joins, say)


def _work(
    cfg: RLExperiment.Config,
    run: RunDirectory,
    name: str,
    actors: dict[str, Any],
    joins: Callable[[Services], Joins],
    say: Say,
) -> None:
    events = EventLog(run.events_path)
    address = read_cluster(run)["address"]
    shutdown = GracefulShutdown(name, events, cfg.timeouts.grace, signals=(signal.SIGTERM, signal.SIGINT))
    ProfileSignal(run.path)
    over = lambda: not cluster_path(run).exists() or _has_ended(address)  # noqa: E731
    services = connect_services(name, actors, cfg, events, over)
    try:
        worker = joins(services)
        shutdown.abandon = worker.abandon
        events.append(name, "start", pid=os.getpid(), host=socket.gethostname())
        say(f"{name} joined {run.path}; on Ctrl-C or SIGTERM it hands back its work and leaves")
        with jax.set_mesh(make_mesh()), Heartbeat(name, actors["controller"]):
            worker.run(lambda: shutdown.requested)
    except RoleGone as error:  # role is gone in the middle of a call
        if cluster_path(run).exists():
            raise _lost_driver(run) from error
        say("the run is over")
    else:
        say("left" if shutdown.requested else "the run is over")
    if shutdown.requested:
        shutdown.done()


def _actors(run: RunDirectory, namespace: str, cfg: RLExperiment.Config) -> dict[str, Any]:
    names = (*server_names(cfg), "controller", "verifier")
    try:
        return {name: ray.get_actor(name, namespace=namespace) for name in names}
    except ValueError as error:
        raise _lost_driver(run) from error


def _has_ended(address: str) -> bool:
    """Return True if nothing listens at the address of the run's Ray; a host that cannot be reached may come back."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _lost_driver(run: RunDirectory) -> UserError:
    return UserError(f"the run in {run.path} has lost its driver; resume it with `axl rl`, then join")
