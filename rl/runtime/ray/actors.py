"""The Ray side of the runtime: one generic actor that hosts a role, and a proxy that looks like the role.

An actor builds its role from the config in the run directory, in its own process. Roles call each other through proxies
with plain method calls; weights travel over connections of their own (see rl/parameter_server/transport).
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from axlearn_like.config import from_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import UserError, enable_compilation_cache, make_mesh
from mesh.devices import configure_cpu_devices
from mesh.distributed import ProcessGroup, free_address, join, process_name
from rl.experiment import RLExperiment
from rl.parameter_server.client import ParameterServerClient, connect
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.rpc import RemoteShardServer
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.endpoint import Endpoint
from rl.roles.timeouts import Timeouts, Waits
from rl.runtime.ray.shutdown import GracefulShutdown

_SHARD_TIMEOUT = 5.0  # seconds
_MARGIN = 60.0  # seconds that a call may last beyond the time after which an unresponsive role is killed


class RoleGone(UserError):
    """A role has ended and will not come back."""


def result(reference: Any, timeout: float | None = None) -> Any:
    """Call `ray.get`, and raise an error of the actor as the actor raised it, without Ray's wrapping."""
    try:
        return ray.get(reference, timeout=timeout)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()
        raise cause from None


class RemoteRole:
    """A role that runs in an actor: its methods, called synchronously.

    A long call is logged as an event of the caller. A call waits up to `timeouts.restart` seconds for an actor that is
    being restarted, and waits for one that does not answer until the driver has killed it; then the error names the
    role.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        timeouts: Timeouts.Config,
        *,
        limit: float | None = None,
        caller: str = "driver",
        events: EventLog | None = None,
        over: Callable[[], bool] = lambda: False,
    ):
        """`limit`: seconds that a call may take beyond its own `timeout`. `over()`: the run is over."""
        self._name, self._actor, self._timeouts = name, actor, timeouts
        self._limit = timeouts.unresponsive + _MARGIN if limit is None else limit
        self._caller, self._events, self._over = caller, events, over

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            wait = kwargs.get("timeout", 0.0)
            return self._call(method, lambda: self._actor.call.remote(method, args, kwargs), wait)

        return call

    def _call(self, method: str, start: Callable[[], Any], wait: float = 0.0) -> Any:
        waits, give_up = Waits(self._timeouts.warn_after + wait), None
        waits.begin(method)
        while True:
            try:
                return self._answer(start(), method, waits, self._limit + wait)
            except RayActorError as error:
                if self._over():
                    raise RoleGone(f"{self._name} is gone: {error}") from error
                give_up = give_up or time.monotonic() + self._timeouts.restart
                if time.monotonic() > give_up:
                    raise UserError(
                        f"{self._name} died and has not restarted within {self._timeouts.restart:g} s "
                        f"(timeouts.restart): {error}"
                    ) from error
                self._report(method, waits, "to restart")
                time.sleep(0.2)

    def _answer(self, reference: Any, method: str, waits: Waits, limit: float) -> Any:
        give_up = time.monotonic() + limit
        while (left := give_up - time.monotonic()) > 0:
            if ray.wait([reference], timeout=min(1.0, left))[0]:
                return result(reference)
            self._report(method, waits, f"to answer ({method})")
        raise UserError(f"{self._name}.{method} has not answered for {limit:.0f} s")

    def _report(self, method: str, waits: Waits, what: str) -> None:
        if self._events is not None and waits.due(method):
            seconds = round(waits.begin(method), 1)
            self._events.append(self._caller, "waiting", who=self._caller, what=f"{self._name} {what}", seconds=seconds)


class RemoteServer(RemoteRole):
    """The actor of a parameter server process. Other roles only ask for its address, and connect to it."""

    def locate(self) -> Endpoint:
        """Return the endpoint of the process that is alive now."""
        return self._call("endpoint", self._actor.endpoint.remote)


def server_names(cfg: RLExperiment.Config) -> list[str]:
    """Return the names of the parameter server's actors, the one with the directory first."""
    return ["parameter-server", *(f"parameter-server-{n}" for n in range(1, cfg.parameter_server.shard_servers))]


def trainer_names(cfg: RLExperiment.Config) -> list[str]:
    """Return the names of the trainer's actors, the leader first."""
    return [process_name("trainer", index) for index in range(cfg.trainer.processes)]


def connect_services(
    caller: str,
    actors: dict[str, Any],
    cfg: RLExperiment.Config,
    events: EventLog,
    over: Callable[[], bool] = lambda: False,
) -> tuple[Any, ParameterServerClient, Any]:
    """Connect `caller` to the controller, the parameter server and the verifier."""
    timeouts, known = cfg.timeouts, {"caller": caller, "events": events, "over": over}
    controller = RemoteRole("controller", actors["controller"], timeouts, **known)
    names = server_names(cfg)
    servers = [RemoteServer(name, actors[name], timeouts, **known) for name in names]

    def on_wait(shard: int, what: str, seconds: float) -> None:
        events.append(caller, "waiting", who=caller, what=f"{names[shard]} {what}", seconds=round(seconds, 1))

    locate = [server.locate for server in servers]
    weights = connect(
        cfg.parameter_server,
        locate,
        on_wait=on_wait,
        warn_after=timeouts.warn_after,
        advertised_host=ray.util.get_node_ip_address(),
    )
    verifier = RemoteRole("verifier", actors["verifier"], timeouts, limit=timeouts.batch, **known)
    return controller, weights, verifier


class RoleHost:
    """The actor that hosts one role. `kind` names the `make_` method of the experiment that builds the role.

    After a restart the role is built again, by the first call at the latest: the caller gets the error if that fails.
    On SIGTERM the actor hands back or saves its work and exits with status 0 (see shutdown.py); Ray restarts it on any
    node with room.
    """

    def __init__(self, kind: str, name: str, run_path: str, token: str, grace: float, namespace: str):
        self._kind, self._name, self._token, self._namespace = kind, name, token, namespace
        self._run = RunDirectory.attach(run_path)
        self._events = EventLog(self._run.events_path)
        self._services: dict[str, Any] = {}
        self._meeting = ""  # the address where several trainer processes join
        self._building = threading.Lock()
        self._role: Any = None
        self._stopping = False
        self._incarnation = secrets.token_hex(8)  # of this process
        self._shutdown = GracefulShutdown(name, self._events, grace)
        self._shutdown.has_loop = False
        if kind in ("parameter_server", "controller", "verifier"):  # they call no other role: build at once
            threading.Thread(target=self._prepare, daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the role, for another role."""
        return getattr(self._built(), method)(*args, **kwargs)

    def endpoint(self) -> Endpoint:
        """Return the address at which this parameter server process listens."""
        return self._built().listen(ray.util.get_node_ip_address())

    def run_worker(self, services: dict[str, Any]) -> dict[str, Any]:
        """Run the worker's loop until the controller stops the run. `services`: actors of the roles that it calls."""
        self._services, self._shutdown.has_loop = services, True
        worker = self._built()
        self._shutdown.abandon = worker.abandon
        with jax.set_mesh(make_mesh()):
            worker.run(stop=lambda: self._shutdown.requested)
        return self._end_of_loop()

    def meeting_place(self) -> str:
        """Return an address on this host where the trainer processes can join."""
        return free_address(ray.util.get_node_ip_address())

    def run_trainer(self, services: dict[str, Any], meeting: str = "") -> dict[str, Any]:
        """Run the trainer's loop, which ends by saving. `meeting`: the address where several processes join."""
        self._services, self._meeting, self._shutdown.has_loop = services, meeting, True
        trainer = self._built()
        trainer.run(stop=lambda: self._stopping or self._shutdown.requested)
        return self._end_of_loop(step=trainer.step)

    def stop(self) -> None:
        """Request that the loop ends after the current update."""
        self._stopping = True

    @ray.method(concurrency_group="health")
    def incarnation(self) -> str:
        """Return an id of this process of the actor; answered whatever else the actor does."""
        return self._incarnation

    def _end_of_loop(self, **fields: Any) -> dict[str, Any]:
        """Return to the driver which process this is, and if it is about to exit."""
        requested = self._shutdown.requested
        if requested:
            self._shutdown.done(**fields)
        return {"incarnation": self._incarnation, "shutdown": requested, **fields}

    def _prepare(self) -> None:
        with contextlib.suppress(Exception):  # the first caller gets the error
            self._built()

    def _built(self) -> Any:
        with self._building:
            if self._role is None:
                enable_compilation_cache()
                self._role = self._build(from_text(self._run.config_path.read_text()).build())
                self._events.append(self._name, "start", pid=os.getpid(), host=socket.gethostname())
            return self._role

    def _build(self, experiment: RLExperiment) -> Any:
        if self._kind == "parameter_server":
            return self._build_server(experiment)
        if self._kind == "verifier":
            return experiment.make_verifier()
        if self._kind == "controller":
            return experiment.make_controller(self._run)
        controller, weights, verifier = connect_services(self._name, self._services, experiment.cfg, self._events)
        if self._kind == "trainer":
            processes = self._joined(experiment.cfg)
            return experiment.make_trainer(self._run, controller, weights, processes)
        began = psutil.Process().create_time()
        return experiment.make_worker(self._name, self._run, controller, weights, verifier, began=began)

    def _joined(self, cfg: RLExperiment.Config) -> ProcessGroup:
        """Join the trainer's other processes, if there are several, and configure the devices of this one."""
        names, timeouts = trainer_names(cfg), cfg.timeouts
        if cfg.trainer.mesh:
            configure_cpu_devices(cfg.trainer.mesh, len(names))  # as the command did when it checked the mesh
        if len(names) > 1:
            beyond = timeouts.unresponsive + _MARGIN  # by then the driver has killed a process that does not answer
            join(self._meeting, names.index(self._name), len(names), role="trainer", timeout=beyond, heartbeat=beyond)

        def on_wait(who: str, seconds: float) -> None:
            what = f"{who} to reach the same step"
            self._events.append(self._name, "waiting", who=self._name, what=what, seconds=round(seconds, 1))

        return ProcessGroup("trainer", on_wait=on_wait, warn_after=timeouts.warn_after, limit=2 * timeouts.batch)

    def _build_server(self, experiment: RLExperiment) -> ParameterServer:
        names = server_names(experiment.cfg)
        index = names.index(self._name)
        others = [self._shard(name) for name in names[1:]] if index == 0 else []
        return experiment.make_parameter_server(index=index, others=others, token=self._token)

    def _shard(self, name: str) -> RemoteShardServer:
        """Connect the directory to a shard server. It never waits: a dead one must be an error at once."""

        def locate() -> Endpoint:
            try:
                return result(ray.get_actor(name, self._namespace).endpoint.remote(), _SHARD_TIMEOUT)
            except (RayError, ValueError) as error:
                raise WeightsError(f"{name} is not running: {error}") from error

        return RemoteShardServer(RpcClient(locate, name=name, connect_timeout=_SHARD_TIMEOUT, retry_timeout=0.0))
