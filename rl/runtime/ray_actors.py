"""The Ray side of the runtime: one generic actor that hosts a role, and a proxy that looks like the role.

An actor builds its role from the config in the run directory, in its own process. Roles call each other through proxies
with plain method calls; bulk weights do not take this way (see weights/wire.py).
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from axlearn_like.config_text import from_text
from axlearn_like.run_directory import EventLog, RunDirectory
from mesh import UserError, enable_compilation_cache, make_mesh
from mesh.devices import one_device_per_core
from rl.experiment import RLExperiment
from rl.weights.access import connect
from rl.weights.wire import Endpoint


def result(reference: Any, timeout: float | None = None) -> Any:
    """`ray.get`, with a user's mistake as it was raised in the actor, without Ray's wrapping of it."""
    try:
        return ray.get(reference, timeout=timeout)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()
        raise cause from None


class RemoteRole:
    """A role that lives in an actor: its methods, called synchronously.

    An actor that is being restarted is waited for, up to `patience` seconds; then the error names the role. A call may
    take `limit` seconds beyond its own `timeout`.
    """

    def __init__(self, name: str, actor: Any, *, patience: float = 90.0, limit: float | None = 120.0):
        self._name, self._actor, self._patience, self._limit = name, actor, patience, limit

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            wait = kwargs.get("timeout", 0.0)
            return self._patiently(method, lambda: self._actor.call.remote(method, args, kwargs), wait)

        return call

    def _patiently(self, method: str, start: Callable[[], Any], wait: float = 0.0) -> Any:
        limit = None if self._limit is None else self._limit + wait
        give_up: float | None = None
        while True:
            try:
                return result(start(), limit)
            except GetTimeoutError as error:
                raise UserError(f"{self._name}.{method} has not answered for {limit:.0f} s") from error
            except RayActorError as error:
                give_up = give_up or time.monotonic() + self._patience
                if time.monotonic() > give_up:
                    raise UserError(f"{self._name} is gone: {error}") from error
                time.sleep(0.2)


class RemoteServer(RemoteRole):
    """The parameter server's actor, of which others ask only where its bytes are served."""

    def locate(self) -> Endpoint:
        """Of the process that is alive now."""
        return self._patiently("endpoint", self._actor.endpoint.remote)


class RoleHost:
    """The actor's class. `kind` names the `make_` method of the experiment that builds the role.

    The role is built at the first call, so that what is wrong with it is raised to the caller as it is, and anew after
    a restart.
    """

    def __init__(self, kind: str, name: str, run_path: str, token: str):
        self._kind, self._name, self._token = kind, name, token
        self._run = RunDirectory.attach(run_path)
        self._peers: dict[str, Any] = {}
        self._building = threading.Lock()
        self._role: Any = None
        self._stopping = False

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any method of the role, from any other role."""
        return getattr(self._built(), method)(*args, **kwargs)

    def endpoint(self) -> Endpoint:
        """Where the parameter server's bytes are served."""
        return self._built().listen()

    def run_worker(self, peers: dict[str, Any]) -> None:
        """The rollout worker's loop, until the controller stops the run. `peers`: actors of the roles it calls."""
        self._peers = peers
        worker = self._built()
        with jax.set_mesh(make_mesh()):
            worker.run()

    def run_trainer(self, peers: dict[str, Any]) -> int:
        """The trainer's loop; returns the updates completed."""
        self._peers = peers
        return self._built().run(stop=lambda: self._stopping)

    def stop(self) -> None:
        """Ask a loop to end after the update in hand."""
        self._stopping = True

    def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def _built(self) -> Any:
        with self._building:
            if self._role is None:
                enable_compilation_cache()
                self._role = self._build(from_text(self._run.config_path.read_text()).build())
                EventLog(self._run.events_path).append(self._name, "start", pid=os.getpid())
            return self._role

    def _build(self, experiment: RLExperiment) -> Any:
        if self._kind == "parameter_server":
            return experiment.make_parameter_server(token=self._token)
        if self._kind == "verifier":
            return experiment.make_verifier()
        if self._kind == "controller":
            return experiment.make_controller(self._run)
        controller: Any = RemoteRole("controller", self._peers["controller"])
        server = RemoteServer("parameter-server", self._peers["server"])
        weights = connect(experiment.cfg.parameter_server, [server.locate])
        if self._kind == "trainer":
            if experiment.trainer_cfg.mesh:
                one_device_per_core()  # as in the command, which has seen that the mesh fits
            return experiment.make_trainer(self._run, controller, weights)
        verifier: Any = RemoteRole("verifier", self._peers["verifier"], limit=None)  # it has deadlines of its own
        return experiment.make_worker(self._name, self._run, controller, weights, verifier)
