"""The process of a role, which runs it, or prepares to run it in the place of another."""

import contextlib
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import jax
import ray

from axlearn_like.config import from_text
from axlearn_like.operations.profiler import ProfileSignal
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import UserError, enable_compilation_cache, make_mesh
from mesh.devices import configure_cpu_devices, keep_step_memory
from mesh.distributed import ProcessGroup, free_address
from rl.experiment import RLExperiment
from rl.fleet.processes import prepare_process
from rl.fleet.requests import RoleRequest
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.transport.endpoint import Endpoint
from rl.rollout.worker import RolloutWorker
from rl.runtime.ray.heartbeat import Heartbeat
from rl.runtime.ray.role_builder import RoleBuilder
from rl.runtime.ray.shutdown import GracefulShutdown
from rl.runtime.standby import rehearse, states_config
from rl.runtime.supervision.names import REFERENCE
from rl.runtime.supervision.role_group import Report
from rl.training.warm_start import run_warm_start

_POLL = 0.2  # seconds between two looks for a later driver


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
        run = RunDirectory.attach(run_path)
        self._at = RoleBuilder(kind, name, run, EventLog(run.events_path), token, namespace, request)
        self._building = threading.Lock()
        self._callable = threading.Event()  # a process that joins others is built by its loop, not by the first call
        if kind != REFERENCE:
            self._callable.set()
        self._role: Any = None
        self._stopping = False
        self._incarnation = secrets.token_hex(8)  # incarnation of this process
        self._driver = 0  # number of the latest driver that has asked
        self._loop: Future[dict[str, Any]] | None = None  # result of `run`
        self._preparing, self._prepared_as = threading.Lock(), ""
        self._shutdown = GracefulShutdown(name, self._at.events, grace)
        self._shutdown.has_loop = False
        ProfileSignal(self._at.run.path)
        if kind in ("parameter_server", "controller", "verifier"):  # roles that call no other: build at once
            threading.Thread(target=self._prepare, daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], policy: str = "", term: int = 0) -> Any:
        """Call the role, for another, of a `policy` of several; `term`: of a trainer (UserError: a later one has)."""
        if term < self._at.term and term:
            raise UserError(f"{self._at.name}.{method}: trainer number {term} was replaced by number {self._at.term}")
        self._at.term = max(term, self._at.term)
        self._callable.wait()
        return getattr(self._role_of(policy), method)(*args, **kwargs)

    def heard(self, worker: str) -> None:
        """Record a heartbeat of a worker at this controller, if that is built: it waits for nothing."""
        if self._role is not None:
            self._role.heard(worker)

    def ping(self) -> str:
        """Return an id of this process of the actor."""
        return self._incarnation

    def report(self, driver: int) -> Report:
        """Tell a new driver what this process does; former drivers (smaller numbers) start nothing here any more."""
        self._driver = max(self._driver, driver)
        at, runs = self._at, self._loop is not None
        return Report(at.name, os.getpid(), self._incarnation, at.term, runs=runs, prepared_as=self._prepared_as)

    def outcome(self, driver: int) -> dict[str, Any]:
        """Return what the loop that a former driver has begun returns, when it does, unless another driver asks."""
        assert self._loop is not None, "report"
        while self._driver == driver:
            with contextlib.suppress(TimeoutError):
                self._loop.exception(_POLL)
                return self._loop.result()
        raise UserError(f"{self._at.name}: driver number {driver} was replaced by number {self._driver}")

    def endpoint(self, policy: str = "") -> Endpoint:
        """Return where this process listens as a parameter server, for one policy of several, or for states."""
        if self._at.kind == "trainer" and self._at.states is None:
            raise WeightsError(f"{self._at.name} holds no states yet")
        return (self._at.states or self._role_of(policy)).listen(ray.util.get_node_ip_address())

    def _role_of(self, policy: str) -> Any:
        role = self._built()
        return role.of(policy) if policy else role

    def prepare(self, services: dict[str, Any], name: str) -> str:
        """Build and compile what a later `run` needs, in the place of a process that dies; returns this process's id.

        A spare of the trainer that is prepared compiles its programs for the newest batch, too, whose shape may be new.

        Args:
            name: name in events until then.
        """
        with self._preparing:
            if not self._prepared_as:
                self._at.services, self._at.name = services, name
                self._prepare_to_run()
                self._prepared_as = name
            elif self._at.kind == "trainer":
                self._rehearse()
        return self._incarnation

    def _prepare_to_run(self) -> None:
        if self._at.kind == "worker":
            worker, connected = self._built(), self._at.connected(self._experiment)
            with jax.set_mesh(make_mesh()):
                return worker.warm_up(connected.weights[""].directory.latest)
        cfg = self._experiment.cfg
        self._at.processes = self._joined_trainer(cfg, "")
        self._at.states = states_config(cfg).build(token=self._at.token)
        self._announce()
        return self._rehearse()

    def _rehearse(self) -> None:
        controller, states = self._at.connected(self._experiment).controller, self._at.states
        assert states is not None, "prepare"
        rehearse(self._experiment, self._at.run, controller, states, lambda: self._loop is not None)

    def run(self, services: dict[str, Any], meeting: str, name: str, term: int, driver: int = 0) -> dict[str, Any]:
        """Run the loop of the role until it ends; returns which process this is, and if it is about to exit.

        Args:
            meeting: the address where several processes of one role join; "": it is alone.
            term: number of the trainer, which counts its starts.
            driver: number of the driver that asks (UserError: a later one has).
        """
        if driver < self._driver:
            raise UserError(f"{name}: driver number {driver} was replaced by number {self._driver}")
        loop = self._loop = Future[dict[str, Any]]()
        try:
            loop.set_result(self._run(services, meeting, name, term))
        except BaseException as error:
            loop.set_exception(error)
        return loop.result()

    def _run(self, services: dict[str, Any], meeting: str, name: str, term: int) -> dict[str, Any]:
        self._at.services, self._shutdown.has_loop, self._at.term = services, True, term
        self._at.name = self._shutdown.name = name
        if self._role is not None:  # prepared
            self._role.name = name
            self._announce()
        loops = {"worker": self._run_worker, "trainer": self._run_trainer, REFERENCE: self._run_reference}
        fields = loops[self._at.kind](meeting)
        requested = self._shutdown.requested
        if requested:
            self._shutdown.done(**fields)
        return {"incarnation": self._incarnation, "shutdown": requested, **fields}

    def _run_worker(self, meeting: str) -> dict[str, Any]:
        """Run the worker's loop until the controller stops the run, or follow the process that does."""
        if meeting and self._at.processes is None:
            self._at.processes = self._at.joined(self._experiment.cfg, meeting)
        role = self._built()
        if self._at.processes is None:
            with jax.set_mesh(make_mesh()):
                self._work(role)
        elif self._at.processes.leader:
            self._work(role)
        else:
            role.run(leaving=lambda: self._shutdown.requested)
        return {}

    def _work(self, worker: RolloutWorker) -> None:
        self._shutdown.abandon = worker.abandon
        with Heartbeat(self._at.name, self._at.services["controller"]):
            worker.run(stop=lambda: self._shutdown.requested)

    def _run_reference(self, meeting: str) -> dict[str, Any]:
        """Run the reference role's loop, in which it answers the trainer."""
        if self._at.processes is None:
            self._at.processes = self._at.joined(self._experiment.cfg, meeting)
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
        if self._at.processes is None:
            cfg = self._experiment.cfg
            self._at.processes = self._joined_trainer(cfg, meeting)
            if not run_warm_start(cfg.warm_start, self._at.run, stop):
                self._at.processes.barrier()  # a process that ends now takes nothing from the others
                return {"step": 0, "finished": False}
        trainer = self._built()
        trainer.run(stop=stop)
        return {"step": trainer.step, "finished": trainer.finished}

    def _joined_trainer(self, cfg: RLExperiment.Config, meeting: str) -> ProcessGroup:
        keep_step_memory()
        if cfg.trainer.mesh or cfg.warm_start is not None:  # same devices as in the command's check of the mesh
            configure_cpu_devices(cfg.trainer.mesh, cfg.trainer.processes)
        return self._at.joined(cfg, meeting)

    def stop(self) -> None:
        """Request that the loop ends after the current update."""
        self._stopping = True

    def _prepare(self) -> None:
        with contextlib.suppress(Exception):  # the first caller gets the error
            self._built()

    def _built(self) -> Any:
        with self._building:
            if self._role is None:
                self._role = self._at.build(self._experiment)
                self._announce()
            return self._role

    def _announce(self) -> None:
        self._at.events.append(self._at.name, "start", pid=os.getpid(), host=socket.gethostname())

    @cached_property
    def _experiment(self) -> RLExperiment:
        if self._at.request is not None:
            prepare_process(self._at.request)
        enable_compilation_cache()
        return from_text(self._at.run.read_config()).build()
