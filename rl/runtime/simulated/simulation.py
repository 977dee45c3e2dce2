"""A simulated run: the real controller, ledger, leases, workers, directory and broadcast of an experiment, by a clock.

Devices, verifiers, transfers and the starts of processes are durations. What begins, follows a death and is released
then is the real supervisor's doing.
"""

import dataclasses
import gc
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.controller.controller import Controller
from rl.environments.task import environments_of
from rl.experiment import RLExperiment
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.rollout.worker import RolloutWorker
from rl.rollout.worker_policy import WorkerServices
from rl.runtime.simulated.actors import SimulatedActors
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.engine import SimulatedEngine, grain_of
from rl.runtime.simulated.failures import Failure, check_worker
from rl.runtime.simulated.flows import Flows
from rl.runtime.simulated.lengths import AnswerLengths
from rl.runtime.simulated.recorded import RecordedEvents, RecordedLogs, write_rows
from rl.runtime.simulated.services import VERIFIER, RoleCalls, SimulatedVerifier, policy_bytes, repeated
from rl.runtime.simulated.trainer import Saved, SimulatedTrainer, TrainerLog, TrainerParts
from rl.runtime.simulated.virtual_clock import VirtualClock
from rl.runtime.simulated.weights import CORES, SERVER, Links, SimulatedReceiver
from rl.runtime.supervision.role_group import Roles
from rl.runtime.supervision.supervisor import Supervisor
from rl.tasks.mixture import TaskMixture

_GARBAGE = 200_000  # objects between collections: millions of small ones come and go
_PATIENCE = 600.0  # seconds of a request that nothing interrupts but the death of a role


@dataclasses.dataclass(frozen=True)
class SimulationPlan:
    """A run to simulate."""

    cfg: RLExperiment.Config  # the experiment, on its fleet
    durations: Durations
    lengths: AnswerLengths  # tokens of answers
    hours: float = 12.0  # end of the simulation, if the updates have not ended before
    failures: Sequence[Failure] = ()  # failures, in order of time

    def check(self) -> None:
        """Refuse what cannot be simulated (UserError: names the field)."""
        cfg = self.cfg
        cfg.require("workers", cfg.workers >= 1, "1 or more, to simulate")
        cfg.require("policies", not cfg.policies, "{}: one policy, to simulate")
        cfg.require("tasks", not environments_of(cfg.tasks), "tasks without environments, to simulate")
        for name in ("branching", "demonstrations", "interruption", "graph"):
            cfg.require(name, getattr(cfg, name) is None, "None, to simulate")
        if not 0 < self.hours <= 10_000:
            raise UserError(f"--hours {self.hours:g}: expected more than 0 and at most 10,000")
        for one in self.failures:
            check_worker(one.target, cfg.workers)


class Simulation:
    """One run; `run` returns when its time is over.

    Attributes:
        trainer_log: what the trainer has done.
        engines: engines by worker, of all incarnations.
        alive: times from which and until which each worker lived.
        finished: all updates are made.
    """

    def __init__(self, plan: SimulationPlan, run: RunDirectory):
        """Build the roles; `run`: a new run directory."""
        plan.check()
        self.plan, self._run, cfg, d = plan, run, plan.cfg, plan.durations
        made = cfg.clone(tasks=repeated(cfg.tasks)) if isinstance(cfg.tasks, TaskMixture.Config) else cfg
        self._experiment = made.build()
        self.clock = VirtualClock()
        self.events = RecordedEvents(run.events_path, self.clock, grain_of(self._experiment.engine_cfg))
        self.flows = Flows(self.clock, self._capacities(cfg, d))
        nbytes = d.weights_bytes or policy_bytes(self._experiment)
        self.links = Links(self.clock, self.flows, d, nbytes)
        self._server = cfg.parameter_server.build(clock=self.clock)
        self._controller: Controller | None = self._experiment.make_controller(
            run, events=self.events, clock=self.clock
        )
        self._up = self.clock.condition()
        self.trainer_log, self._saved = TrainerLog(), Saved()
        self.engines: dict[str, list[SimulatedEngine]] = {}
        self.alive: dict[str, list[list[float]]] = {}
        self._gone: set[str] = set()
        self._supervised = cfg.clone(standby={})  # seconds of starts are those of what takes over
        self._workers = {f"worker-{number}" for number in range(cfg.workers)}
        self._actors = SimulatedActors(self.clock, self)
        self._roles = Roles(self._supervised, self._actors)
        self._logs = RecordedLogs(self.events, lambda: self.step)
        self._slow: dict[str, float] = {}
        self._rng = random.Random(cfg.seed)
        self.finished = False

    def run(self) -> None:
        """Simulate to the end of the updates, or of the time."""
        self.events.append("controller", "start")
        self.clock.spawn("driver", self._supervise)
        for failure in self.plan.failures:
            if failure.time < self.plan.hours * 3600:
                self.clock.timer(failure.time, lambda failure=failure: self._fail(failure))
        self.clock.timer(self.plan.hours * 3600, self.clock.stop)
        try:
            self.clock.run()
        finally:
            if self._controller is not None:
                self._controller.on_change = lambda: None
        for spans in self.alive.values():
            if spans and len(spans[-1]) == 1:
                spans[-1].append(self.clock())

    def _supervise(self) -> None:
        """Supervise the roles as the driver of a real run does, to the end of the updates."""
        supervisor = Supervisor(self._supervised, self._roles, self._actors, self._logs, self.events, lambda text: None)
        supervisor.run(lambda: False, lambda step: None, lambda: False)
        self.clock.stop()

    @property
    def step(self) -> int:
        """Completed updates."""
        return self.trainer_log.rows[-1]["step"] if self.trainer_log.rows else 0

    def write(self) -> None:
        """Write events and metrics into the run directory, with virtual times."""
        self.events.flush()
        write_rows(self._run.path / "metrics.jsonl", self.trainer_log.rows)

    # ---- roles

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call the controller as another role does: after the seconds of a call, and once it is there."""
        self.links.spend(self.plan.durations.call)
        with self._up:
            self._up.wait_for(lambda: self._controller is not None)
        if method == "submit" and self.plan.durations.cores is not None:
            count = sum(len(group.rollouts) for group in arguments[1])
            self.flows.send((CORES,), self.plan.durations.rollout_rest * count, 1.0)
        return getattr(self._controller, method)(*arguments, **named)

    def work(self, seconds: float, cores: float = 1.0) -> None:
        """Let a computation pass, on cores of its own or with others on those of the host."""
        if self.plan.durations.cores is None:
            self.clock.sleep(seconds)
        else:
            self.flows.pass_through((CORES,), seconds * cores, cores)

    def _train(self) -> None:
        parts = TrainerParts(
            self._experiment.trainer_cfg,
            self.clock,
            self.links,
            self._server,
            RoleCalls(self.call),
            self.events,
            self.work,
        )
        grain = grain_of(self._experiment.engine_cfg)
        SimulatedTrainer(parts, self._saved, self.trainer_log, grain).run()
        self.finished = True

    def _work_as(self, name: str) -> None:
        cfg, d, experiment = self.plan.cfg, self.plan.durations, self._experiment
        work = lambda seconds: self.work(seconds, d.decode_cores)  # noqa: E731
        progress = lambda: (self.clock(), self.step / cfg.num_steps)  # noqa: E731
        engine = SimulatedEngine(experiment.engine_cfg, d, self.plan.lengths, work, progress)
        engine.slow = self._slow.get(name, 1.0)
        self.engines.setdefault(name, []).append(engine)
        self.alive.setdefault(name, []).append([self.clock()])
        assert self._server.directory is not None
        receiver = SimulatedReceiver(
            name, self.links, self._server.directory, peer_to_peer=cfg.parameter_server.peer_to_peer
        )
        newest = cfg.controller.weights != "pinned"
        prefetcher = Prefetcher(receiver, lambda pulled: pulled, newest=newest, clock=self.clock, patience=_PATIENCE)
        controller: Any = RoleCalls(self.call)
        services = WorkerServices[Any](controller, prefetcher, SimulatedVerifier(self.links), self.events)
        policy = experiment.worker_policy(services)
        engine_as: Any = engine
        RolloutWorker(name, engine_as, {"": policy}, swap=cfg.swap).run(patience=_PATIENCE)

    # ---- failures

    def _fail(self, failure: Failure) -> None:
        name = failure.target
        if name == "worker":
            back = failure.kind == "back"
            found = sorted(self._gone) if back else sorted(self.engines.keys() - self._gone)
            if not found:
                return
            name = self._rng.choice(found)
        if failure.kind == "slow":
            self._slow[name] = failure.factor
            for engine in self.engines.get(name, ())[-1:]:
                engine.slow = failure.factor
        elif failure.kind == "back":
            if name in self._gone:
                self._gone.discard(name)
                self._actors.come_back(name)
        elif name not in self._gone:
            self._gone |= {name} if failure.kind == "gone" else set()
            self._kill(name, host=failure.kind == "gone")

    def _kill(self, name: str, *, host: bool) -> None:
        self.events.append("chaos", "kill", target=name, step=self.step, saved=self._saved.step)
        if name == "raylet":  # all roles go, and come back
            for role in ("controller", *sorted(self.engines.keys() - self._gone), "trainer"):
                self._actors.kill(role)
        elif name != "driver":  # roles work on without it
            self._actors.kill(name, host=host)

    def seconds(self, kind: str) -> float:
        """Return the seconds of the start of a process of a role."""
        d = self.plan.durations
        return {"trainer": d.start_trainer, "worker": d.start_worker, "controller": d.start_controller}.get(kind, 0.0)

    def ended(self, name: str) -> None:
        """End what a killed process did."""
        if name == "controller":
            if self._controller is not None:
                self._controller.stop()  # calls of a dead process end
            self._controller = None
            self.events.flush()  # a new controller counts the starts of former ones
        elif self.clock.kill(name):
            self.flows.drop(name)
            if name != "trainer":
                self.flows.cut(f"{name}:out")
                self.alive[name][-1].append(self.clock())

    def begun(self, name: str) -> None:
        """Build the controller again; the others are built by their loops."""
        if name == "controller":
            with self._up:
                self.events.append("controller", "start")
                self._controller = self._experiment.make_controller(self._run, events=self.events, clock=self.clock)
                for worker in self.engines.keys() - self._gone:
                    self._controller.join(worker)
                self._up.notify_all()

    def run_role(self, name: str, returned: Callable[[dict[str, Any]], None]) -> None:
        """Begin the loop of a process; of several of one role, the first one's stands for all."""
        role = self._train if name == "trainer" else lambda: self._work_as(name)

        def run() -> None:
            role()
            returned({"shutdown": False, "finished": self.finished, "step": self.step})

        if name == "trainer" or name in self._workers:
            self.events.append(name, "start")
            self.clock.spawn(name, run)

    def call_service(self, name: str, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a service, if it is there."""
        role = {"controller": self._controller, "parameter-server": self._server}.get(name)
        if role is not None:
            getattr(role, method)(*arguments)

    def _capacities(self, cfg: RLExperiment.Config, d: Durations) -> dict[str, float]:
        links = {VERIFIER: d.verifiers, f"{SERVER}:in": d.server_network, f"{SERVER}:out": d.server_network}
        links |= {"trainer:out": d.server_network, CORES: d.cores or 1.0, "core": d.core_network or 1.0}
        for number in range(cfg.workers):
            links |= {f"worker-{number}:{way}": d.worker_network for way in ("in", "out")}
        return links


def check_new(folder: Path) -> None:
    """Refuse a file, and the directory of another run, as a place to write to (UserError)."""
    if folder.is_file():
        raise UserError(f"run directory {folder} is a file; expected a directory or a new path")
    if (folder / "events.jsonl").exists() and read_rows(folder / "events.jsonl"):
        raise UserError(f"{folder}: has a run already; expected a new directory")


def simulate(plan: SimulationPlan, folder: Path) -> Simulation:
    """Simulate a run in a new run directory, and write its events and metrics there."""
    check_new(folder)
    collected = gc.get_threshold()
    gc.set_threshold(_GARBAGE)
    gc.freeze()  # imported modules stay
    try:
        with RunDirectory.open(folder, to_text(plan.cfg)) as run:
            simulation = Simulation(plan, run)
            simulation.run()
            simulation.write()
    finally:
        gc.unfreeze()
        gc.set_threshold(*collected)
    return simulation
