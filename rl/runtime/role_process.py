"""The process of a role: it builds the role from the config in the run directory, and runs it."""

import contextlib
import os
import secrets
import socket
import threading
from functools import cached_property
from typing import Any

import jax
import psutil
import ray
from ray.exceptions import RayError
from ray.util.tpu import get_tpu_coordinator_env_vars

from axlearn_like.config import from_text
from axlearn_like.operations.profiler import ProfileSignal
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import enable_compilation_cache, make_mesh
from mesh.devices import configure_cpu_devices, keep_step_memory
from mesh.distributed import ProcessGroup, free_address, join
from rl.experiment import RLExperiment
from rl.fleet.processes import check_opened, prepare_process
from rl.fleet.requests import RoleRequest
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.rpc import remote_shard_server
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.shard_server import ShardServer
from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.endpoint import Endpoint
from rl.rollout.worker import RolloutWorker
from rl.runtime.policies.roles import PolicyRoles
from rl.runtime.ray.health import Heartbeat
from rl.runtime.ray.proxies import (
    CALL_MARGIN,
    REFERENCE,
    connect_reference,
    connect_services,
    process_groups,
    result,
    server_names,
)
from rl.runtime.ray.shutdown import GracefulShutdown
from rl.training.warm_start import run_warm_start

_SHARD_TIMEOUT = 5.0  # seconds


class RoleProcess:
    """The process that hosts one role. `kind` names the `make_` method of the experiment that builds the role.

    After a restart the role is built again, by the first call at the latest: the caller gets the error if that fails.
    On SIGTERM it hands back or saves its work and exits with status 0 (see shutdown.py); Ray restarts it on any
    node with room. SIGUSR1 asks the trainer for a profile.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        run_path: str,
        token: str,
        grace: float,
        namespace: str,
        request: RoleRequest | None = None,
    ):
        """`request`: the devices that this process has to itself, or None."""
        self._kind, self._name, self._token, self._namespace = kind, name, token, namespace
        self._request = request
        self._run = RunDirectory.attach(run_path)
        self._events = EventLog(self._run.events_path)
        self._services: dict[str, Any] = {}
        self._processes: ProcessGroup | None = None  # processes of a joined role
        self._building = threading.Lock()
        self._callable = threading.Event()  # a process that joins others is built by its loop, not by the first call
        if kind != REFERENCE:
            self._callable.set()
        self._role: Any = None
        self._stopping = False
        self._incarnation = secrets.token_hex(8)  # incarnation of this process
        self._shutdown = GracefulShutdown(name, self._events, grace)
        self._shutdown.has_loop = False
        ProfileSignal(self._run.path)
        if kind in ("parameter_server", "controller", "verifier"):  # roles that call no other: build at once
            threading.Thread(target=self._prepare, daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], policy: str = "") -> Any:
        """Call a method of the role, for another role; `policy`: of the role of this policy, among several."""
        self._callable.wait()
        return getattr(self._role_of(policy), method)(*args, **kwargs)

    def heard(self, worker: str) -> None:
        """Record a heartbeat of a worker at this controller, if that is built: it waits for nothing."""
        if self._role is not None:
            self._role.heard(worker)

    def ping(self) -> str:
        """Return an id of this process of the actor."""
        return self._incarnation

    def endpoint(self, policy: str = "") -> Endpoint:
        """Return the address at which this parameter server process listens, for one policy of several."""
        return self._role_of(policy).listen(ray.util.get_node_ip_address())

    def _role_of(self, policy: str) -> Any:
        role = self._built()
        return role.of(policy) if policy else role

    def run(self, services: dict[str, Any], meeting: str = "") -> dict[str, Any]:
        """Run the loop of the role until it ends; returns which process this is, and if it is about to exit.

        Args:
            services: actors of the roles that it calls.
            meeting: the address where several processes of one role join.
        """
        self._services, self._shutdown.has_loop = services, True
        loops = {"worker": self._run_worker, "trainer": self._run_trainer, REFERENCE: self._run_reference}
        fields = loops[self._kind](meeting)
        requested = self._shutdown.requested
        if requested:
            self._shutdown.done(**fields)
        return {"incarnation": self._incarnation, "shutdown": requested, **fields}

    def _run_worker(self, meeting: str) -> dict[str, Any]:
        """Run the worker's loop until the controller stops the run, or follow the process that does."""
        if meeting and self._processes is None:
            self._processes = self._joined(self._experiment.cfg, meeting)
        role = self._built()
        if self._processes is None:
            with jax.set_mesh(make_mesh()):
                self._work(role)
        elif self._processes.leader:
            self._work(role)
        else:
            role.run(leaving=lambda: self._shutdown.requested)
        return {}

    def _work(self, worker: RolloutWorker) -> None:
        self._shutdown.abandon = worker.abandon
        with Heartbeat(self._name, self._services["controller"]):
            worker.run(stop=lambda: self._shutdown.requested)

    def _run_reference(self, meeting: str) -> dict[str, Any]:
        """Run the reference role's loop, in which it answers the trainer."""
        if self._processes is None:
            self._processes = self._joined(self._experiment.cfg, meeting)
        role = self._built()
        self._callable.set()
        role.run(leaving=lambda: self._shutdown.requested)
        return {}

    def meeting_place(self) -> str:
        """Return an address on this host where the processes of one role can join."""
        return free_address(ray.util.get_node_ip_address())

    def _run_trainer(self, meeting: str) -> dict[str, Any]:
        """Run the warm start, if it is due, and the trainer's loop, which ends by saving."""
        stop = lambda: self._stopping or self._shutdown.requested  # noqa: E731
        if self._processes is None:
            cfg = self._experiment.cfg
            keep_step_memory()
            if cfg.trainer.mesh or cfg.warm_start is not None:  # same devices as in the command's check of the mesh
                configure_cpu_devices(cfg.trainer.mesh, cfg.trainer.processes)
            self._processes = self._joined(cfg, meeting)
            if not run_warm_start(cfg.warm_start, self._run, stop):
                self._processes.barrier()  # a process that ends now takes nothing from the others
                return {"step": 0, "finished": False}
        trainer = self._built()
        trainer.run(stop=stop)
        return {"step": trainer.step, "finished": trainer.finished}

    def stop(self) -> None:
        """Request that the loop ends after the current update."""
        self._stopping = True

    def _prepare(self) -> None:
        with contextlib.suppress(Exception):  # the first caller gets the error
            self._built()

    def _built(self) -> Any:
        with self._building:
            if self._role is None:
                self._role = self._build(self._experiment)
                self._events.append(self._name, "start", pid=os.getpid(), host=socket.gethostname())
            return self._role

    @cached_property
    def _experiment(self) -> RLExperiment:
        if self._request is not None:
            prepare_process(self._request)
        enable_compilation_cache()
        return from_text(self._run.read_config()).build()

    def _build(self, experiment: RLExperiment) -> Any:
        if experiment.cfg.policies:
            return self._build_group(PolicyRoles(experiment, self._run))
        if self._kind == "parameter_server":
            return self._build_server(experiment)
        if self._kind == "verifier":
            return experiment.make_verifier()
        if self._kind == "controller":
            return experiment.make_controller(self._run)
        if self._kind == REFERENCE:
            assert self._processes is not None, "joined by its loop"
            leader = None if self._processes.leader else self._reference(experiment)
            return experiment.make_reference(self._run, self._processes, leader)
        services = connect_services(self._name, self._services, experiment.cfg, self._events)
        weights = services.weights[""]
        if self._kind == "trainer":
            reference = self._reference(experiment)
            return experiment.make_trainer(self._run, services.controller, weights, self._processes, reference)
        several = {"processes": self._processes, "token": self._token}
        if self._processes is None:
            self._check_devices()
        elif not self._processes.leader:
            return experiment.make_remote_runner(weights, **several, host=ray.util.get_node_ip_address())
        began, verifier = psutil.Process().create_time(), services.verifiers[""]
        return experiment.make_worker(
            self._name, self._run, services.controller, weights, verifier, began=began, **several
        )

    def _build_group(self, roles: PolicyRoles) -> Any:
        """Build the roles of all policies of an experiment that has several."""
        if self._kind == "parameter_server":
            return roles.make_parameter_server(self._token)
        if self._kind == "verifier":
            return roles.make_verifier()
        if self._kind == "controller":
            return roles.make_controller()
        services = connect_services(self._name, self._services, roles.cfg, self._events)
        if self._kind == "trainer":
            return roles.make_trainer(services.controller, services.controllers, services.weights)
        self._check_devices()
        began = psutil.Process().create_time()
        return roles.make_worker(self._name, services.controller, services.weights, services.verifiers, began)

    def _reference(self, experiment: RLExperiment) -> Any:
        return connect_reference(self._name, self._services, experiment.cfg, self._events)

    def _joined(self, cfg: RLExperiment.Config, meeting: str) -> ProcessGroup:
        """Join the other processes of this role, if there are several, and open this one's devices."""
        names = next(names for names in process_groups(cfg)[self._kind] if self._name in names)
        timeouts = cfg.timeouts
        if len(names) > 1:
            index = names.index(self._name)
            os.environ |= self._slice_variables(meeting, index)
            beyond = timeouts.unresponsive + CALL_MARGIN  # the driver kills unresponsive processes before that
            join(meeting, index, len(names), role=names[0], timeout=beyond, heartbeat=beyond)
        self._check_devices()

        def on_wait(who: str, seconds: float) -> None:
            what = f"{who} to reach the same step"
            self._events.append(self._name, "waiting", who=self._name, what=what, seconds=round(seconds, 1))

        return ProcessGroup(names[0], on_wait=on_wait, warn_after=timeouts.warn_after, limit=2 * timeouts.batch)

    def _slice_variables(self, meeting: str, index: int) -> dict[str, str]:
        """Return the variables by which libtpu joins several slices to one program; empty for one slice."""
        if self._request is None or self._request.slices == 1:
            return {}
        host = meeting.rpartition(":")[0]
        return get_tpu_coordinator_env_vars(host, self._request.slices, index // self._request.hosts_per_slice)

    def _check_devices(self) -> None:
        if self._request is not None:
            check_opened(self._request, jax.local_devices())

    def _build_server(self, experiment: RLExperiment) -> ParameterServer:
        names = server_names(experiment.cfg)
        index = names.index(self._name)
        others = [self._shard(name) for name in names[1:]] if index == 0 else []
        return experiment.make_parameter_server(index=index, others=others, token=self._token)

    def _shard(self, name: str) -> ShardServer:
        """Connect the directory to a shard server. It never waits: a dead one must be an error at once."""

        def locate() -> Endpoint:
            try:
                return result(ray.get_actor(name, self._namespace).invoke.remote("endpoint"), _SHARD_TIMEOUT)
            except (RayError, ValueError) as error:
                raise WeightsError(f"{name} is not running: {error}") from error

        return remote_shard_server(RpcClient(locate, name=name, connect_timeout=_SHARD_TIMEOUT, retry_timeout=0.0))
