"""Roles of an experiment with several policies: each a group of one for every policy, in the process of a single one.

Only the engine of a worker and, if the policies are adapters, the base's arrays of a trainer are shared; a policy's
controller, parameter server, verifier and updates are those of a run of its own.
"""

import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, override

from axlearn_like.config import to_text
from axlearn_like.layers.base import Params
from axlearn_like.layers.wrappers.adapters import insert
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.layers.wrappers.shared_base import Base, base_of
from axlearn_like.run.closing import Closing
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import make_mesh
from rl.controller.controller import Controller
from rl.controller.fair_share import FairShare
from rl.experiment import RLExperiment
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.server import ParameterServer
from rl.protocol.players import played_together
from rl.protocol.protocols import BatchSource, PolicyLeaseSource, ScoreSource
from rl.rollout.worker import RolloutWorker
from rl.rollout.worker_policy import WorkerPolicy, WorkerServices
from rl.runtime.policies.adapters import adapter_limits, adapter_source, are_adapters
from rl.runtime.policies.base import check_memory, make_base
from rl.runtime.policies.changes import TakenChanges, WantedChanges, failures, lease_numbers, stopped_policies
from rl.runtime.policies.configs import quotas_of, slots_of
from rl.runtime.policies.controllers import Controllers
from rl.runtime.policies.role_configs import frozen_players, opponents_of, players_by_policy, resume_together
from rl.runtime.policies.runs import ByPolicy, PolicyRun, policy_runs, role_of
from rl.runtime.policies.trainers import PolicyTrainers
from rl.runtime.policies.whole_models import WholeModels
from rl.runtime.policies.worker import PoliciesWorker
from rl.serving.policy import load_params
from rl.training.spec import FirstVersion, TrainerServices
from rl.training.trainer import PolicyTrainer
from rl.verification.service import Verifier


class RolesByPolicy[Role: Verifier | ParameterServer](Closing):
    """Roles of one kind by the policy that they belong to; several policies may have the same one."""

    def __init__(self, names: Collection[str], make: Callable[[str], Role]):
        """Make the roles of these policies; that of one that joins is made when it is asked for."""
        self._make, self._making = make, threading.Lock()
        self._roles = {name: make(name) for name in names}

    def of(self, policy: str) -> Role:
        """Return the role of a policy (UserError: there is no such policy)."""
        with self._making:
            if policy not in self._roles:
                self._roles = {**self._roles, policy: self._make(policy)}
            return self._roles[policy]

    def release(self, worker: str) -> None:
        """Free what a worker that is gone holds at each parameter server."""
        for role in self._distinct():
            if isinstance(role, ParameterServer):
                role.release(worker)

    @override
    def close(self) -> None:
        for role in self._distinct():
            role.close()

    def _distinct(self) -> list[Role]:
        return list({id(role): role for role in self._roles.values()}.values())


class PolicyRoles:
    """The policies of an experiment in the run directory of the whole, and the roles of all of them."""

    def __init__(self, experiment: RLExperiment, run: RunDirectory):
        """`experiment`: it has `policies`. `run`: of the whole; those of the policies are in it."""
        self.cfg, self._experiment, self._run = experiment.cfg, experiment, run
        self._parts: dict[str, PolicyRun] = {}
        self._look()
        self.names = list(self._parts)
        self._players = players_by_policy({name: part.experiment.cfg for name, part in self._parts.items()})
        self._base: Base | None = None  # arrays of the trainers, if they are in this process

    def _look(self) -> None:
        """Find the policies, and those that have joined since, whose directories the driver has opened."""
        for part in policy_runs(self._experiment, self._run):
            if part.name in self.cfg.policies or part.run.config_path.is_file():
                self._parts.setdefault(part.name, part)

    def _part(self, name: str) -> PolicyRun:
        """Return a policy, which may have joined (UserError: there is none of this name)."""
        if name not in self._parts:
            self._look()
        return role_of(self._parts, name)

    def make_controller(self) -> Controllers:
        """Build the controllers."""
        wanted = [numbers[-1] for part in self._parts.values() if (numbers := lease_numbers(part.run))]
        controllers: dict[str, Controller] = {}
        for name in self._parts:
            others = [each.number for each in controllers.values()]
            controllers[name] = self._make_controller(name, others, wanted)
        share = FairShare(weights=self.cfg.policy_shares, quotas=quotas_of(self.cfg))
        events, taken = EventLog(self._run.events_path), TakenChanges(self._run)
        failed, make = failures(self._run), self._make_controller
        return Controllers(controllers, share, events, failed, self._players, make=make, taken=taken)

    def _make_controller(self, name: str, others: Collection[int], wanted: Collection[int] = ()) -> Controller:
        """Build a policy's controller, by the number of its leases, else one in no `others` and after `wanted`."""
        part = self._part(name)
        numbers = [number for number in lease_numbers(part.run)[-1:] if number not in others]
        number = numbers[0] if numbers else max((*others, *wanted), default=-1) + 1
        controller = part.experiment.make_controller(part.run, number)
        here = {"pid": os.getpid(), "host": socket.gethostname()}
        EventLog(part.run.events_path).append("controller", "start", number=number, **here)
        return controller

    def make_parameter_server(self, token: str | None = None) -> RolesByPolicy[ParameterServer]:
        """Build the parameter servers, which hold adapters alone; each listens at an address of its own."""
        return RolesByPolicy(self.names, lambda name: self._part(name).experiment.make_parameter_server(token=token))

    def make_verifier(self) -> RolesByPolicy[Verifier]:
        """Build the verifiers; policies whose configs of it are equal share one."""
        made: dict[str, Verifier] = {}

        def make(name: str) -> Verifier:
            part = self._part(name)
            text = to_text(part.experiment.cfg.verifier)
            if text not in made:
                made[text] = part.experiment.make_verifier()
            return made[text]

        return RolesByPolicy(self.names, make)

    def make_worker(
        self,
        name: str,
        controller: PolicyLeaseSource,
        weights: Mapping[str, ParameterServerClient],
        verifiers: Mapping[str, ScoreSource],
        began: float | None = None,
    ) -> PoliciesWorker | RolloutWorker:
        """Build a worker of all policies.

        Args:
            name: name of the worker.
            controller: leases to it.
            weights: clients of the parameter servers, by policy.
            verifiers: score the answers, by policy.
            began: when its process started, if not now (`time.time()`).
        """
        frozen = frozen_players(self._players)
        players = len(self.names) + sum(frozen.values())
        if adapters := are_adapters(self.cfg.policy):
            room = max(slots_of(self.cfg) - len(self.names), 0)  # adapters of policies that join
            limits = adapter_limits(self.cfg.policy, players + room)
            engine = self._experiment.make_engine(adapters=limits, model=plain_config(self.cfg.policy))
        else:
            engine = self._experiment.make_engine()

        def make(policy: str) -> WorkerPolicy[Any]:
            part, client = self._part(policy), weights[policy]
            own = part.experiment
            if adapters:
                newest = own.cfg.controller.weights == "newest"
                source: Any = adapter_source(own.cfg.policy, client, newest=newest)
            else:
                source = own.make_prefetcher(engine, client, name)
            services = WorkerServices(controller, source, verifiers[policy], EventLog(part.run.events_path))
            return own.worker_policy(services)

        policies = ByPolicy(self.names, make)
        if not adapters and not self._players:
            return RolloutWorker(name, engine, policies, swap=self.cfg.swap, began=began)
        drawing = engine
        if not adapters:
            drawing = WholeModels([engine, *(self._experiment.make_engine() for _ in range(players - 1))])
        base, events = partial(self._base_params, engine.cfg.mesh), EventLog(self._run.events_path)
        return PoliciesWorker(name, drawing, policies, controller, base, events, began=began, frozen=frozen)

    def make_trainer(
        self,
        controller: Controllers,
        batches: Callable[[str], BatchSource],
        weights: Mapping[str, ParameterServerClient],
    ) -> PolicyTrainers:
        """Build the trainers of all policies, adapters on one base; `batches` gives the controller of each."""
        adapters, cfgs = are_adapters(self.cfg.policy), [part.experiment.trainer_cfg for part in self._parts.values()]
        check_memory(cfgs, shared=adapters)
        if adapters:
            self._base = make_base(self._experiment.trainer_cfg, self._experiment.first_version(self._run))
        checkpoints = {name: part.run.checkpoints / "rl" for name, part in self._parts.items()}
        resume_together(checkpoints, played_together(self._players))

        def make(name: str) -> PolicyTrainer:
            part = self._part(name)
            others = (other for other in self._parts.values() if other.name != name)
            beside = tuple(other.run.checkpoints / "rl" for other in others)
            first = None  # version 0 of the whole model itself
            if self._base is not None:
                first = FirstVersion(seed=part.experiment.cfg.seed, base=self._base, beside=beside)
            opponents = opponents_of(name, self._players, part.experiment.cfg.staleness)
            return part.experiment.make_trainer(
                part.run, TrainerServices(batches(name), weights[name]), first=first, opponents=opponents
            )

        def join(name: str) -> PolicyTrainer:
            self._part(name)
            stopped = stopped_policies(self._run)
            going = [one.experiment.trainer_cfg for one in self._parts.values() if one.name not in stopped]
            check_memory(going, shared=adapters)
            return make(name)

        makers = {name: partial(make, name) for name in self.names}
        return PolicyTrainers(makers, controller, WantedChanges(self._run, self.names), join)

    def _base_params(self, mesh: Any) -> Params:
        """Return the base's weights for an engine: the trainers' own, or those with which the experiment begins."""
        base = self._base
        if base is None:
            params = load_params(self._experiment, None, make_mesh(mesh))
            base = {name: leaf for name, leaf in base_of(params).items() if "lora/" not in name}
        tree: Params = {}
        for name, leaf in base.items():
            insert(tree, name, leaf)
        return tree
