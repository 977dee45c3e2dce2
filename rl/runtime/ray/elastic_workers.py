"""Elastic workers: rollout workers that join a run from outside and leave it at any time (`axl worker RUN_DIR`).

The driver writes the address of its Ray cluster and the namespace of its actors into the run directory. A user who can
read that file, on any machine of the cluster, can join. An elastic worker is a plain process that runs a worker's loop.
"""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import jax
import psutil
import ray

from axlearn_like.config import from_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import UserError, make_mesh
from rl.experiment import RLExperiment
from rl.runtime.ray.fault_injection import Say
from rl.runtime.ray.proxies import RoleGone, connect_services, server_names
from rl.runtime.ray.session import ray_session
from rl.runtime.ray.shutdown import GracefulShutdown


def advertise(run: RunDirectory, namespace: str) -> None:
    """Write the file by which elastic workers find the actors of this run."""
    address = ray.get_runtime_context().gcs_address
    path = _path(run)
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        json.dump({"address": address, "namespace": namespace}, file)
    os.replace(temporary, path)


def withdraw(run: RunDirectory) -> None:
    """Remove that file: the run is over, or stopped."""
    _path(run).unlink(missing_ok=True)


def run_elastic_worker(run_dir: Path, name: str | None = None, say: Say = print) -> None:
    """Work for the run in `run_dir` until it is over, or until SIGTERM or Ctrl-C.

    Raises:
        UserError: no run is active there, or its Ray cluster cannot be reached from here.
    """
    run = RunDirectory.attach(run_dir)
    if not run.config_path.is_file():
        raise UserError(f"{run.path} is not a run directory: it has no config.txt")
    try:
        where: dict[str, str] = json.loads(_path(run).read_text())
    except FileNotFoundError:
        raise UserError(
            f"no run under Ray is active in {run.path} (it has no {_path(run).name}); "
            "start or resume it with `axl rl`, then join"
        ) from None
    name = name or f"elastic-{socket.gethostname()}-{os.getpid()}"
    experiment = from_text(run.config_path.read_text()).build()
    with ray_session(where["address"]):
        _work(experiment, run, name, _actors(run, where, experiment.cfg), say)


def _work(experiment: Any, run: RunDirectory, name: str, actors: dict[str, Any], say: Say) -> None:
    events = EventLog(run.events_path)
    shutdown = GracefulShutdown(name, events, experiment.cfg.timeouts.grace, signals=(signal.SIGTERM, signal.SIGINT))
    over = lambda: not _path(run).exists()  # noqa: E731
    controller, weights, verifier = connect_services(name, actors, experiment.cfg, events, over)
    began = psutil.Process().create_time()
    try:
        worker = experiment.make_worker(name, run, controller, weights, verifier, began=began)
        shutdown.abandon = worker.abandon
        events.append(name, "start", pid=os.getpid(), host=socket.gethostname())
        say(f"{name} joined {run.path}; on Ctrl-C or SIGTERM it hands back its work and leaves")
        with jax.set_mesh(make_mesh()):
            worker.run(stop=lambda: shutdown.requested)
    except RoleGone:
        say("the run is over")  # in the middle of a call
    else:
        say("left" if shutdown.requested else "the run is over")
    if shutdown.requested:
        shutdown.done()


def _actors(run: RunDirectory, where: dict[str, str], cfg: RLExperiment.Config) -> dict[str, Any]:
    names = (*server_names(cfg), "controller", "verifier")
    try:
        return {name: ray.get_actor(name, namespace=where["namespace"]) for name in names}
    except ValueError as error:
        raise UserError(f"the run in {run.path} has lost its driver; resume it with `axl rl`, then join") from error


def _path(run: RunDirectory) -> Path:
    return run.path / "cluster.json"
