"""Construction of one role in its process, from the experiment of the run and the actors of the roles that it calls."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import psutil
import ray
from ray.exceptions import RayError
from ray.util.tpu import get_tpu_coordinator_env_vars

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh.distributed import ProcessGroup, join
from rl.experiment import RLExperiment
from rl.fleet.processes import check_opened
from rl.fleet.requests import RoleRequest
from rl.parameter_server.client import connect
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.rpc import remote_shard_server
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.shard_server import ShardServer
from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.endpoint import Endpoint
from rl.runtime.policies.roles import PolicyRoles
from rl.runtime.ray.proxies import CALL_MARGIN, Services, connect_reference, connect_services, result
from rl.runtime.standby import TrainerStates, states_config
from rl.runtime.supervision.names import REFERENCE, process_groups, server_names, spare_names
from rl.training.spec import TrainerServices

_SHARD_TIMEOUT = 5.0  # seconds


@dataclasses.dataclass
class RoleBuilder:
    """Builder of a role."""

    kind: str  # names the `make_` method of the experiment that builds the role
    name: str  # name of the process; a spare gets that of the process whose place it takes
    run: RunDirectory
    events: EventLog
    token: str
    namespace: str  # namespace in which actors have their names
    request: RoleRequest | None = None  # the devices that this process has to itself, or None
    # Actors of the roles that it calls, by name
    services: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    processes: ProcessGroup | None = None  # processes of a role that has joined
    term: int = 0  # number of the trainer that this is, or of the latest that has called this role
    states: ParameterServer | None = None  # a standby's states, sent by the trainer

    def connected(self, experiment: RLExperiment) -> Services:
        """Connect the role to those that it calls."""
        return connect_services(self.name, self.services, experiment.cfg, self.events, term=self.term)

    def build(self, experiment: RLExperiment) -> Any:
        """Build the role."""
        if experiment.cfg.policies:
            return self._build_group(experiment)
        if self.kind == "parameter_server":
            return self._build_server(experiment)
        if self.kind == "verifier":
            return experiment.make_verifier()
        if self.kind == "controller":
            return experiment.make_controller(self.run)
        if self.kind == REFERENCE:
            assert self.processes is not None, "joined by its loop"
            leader = None if self.processes.leader else self._reference(experiment)
            return experiment.make_reference(self.run, self.processes, leader)
        services = self.connected(experiment)
        weights = services.weights[""]
        if self.kind == "trainer":
            called = TrainerServices(
                services.controller, weights, self._reference(experiment), self._trainer_states(experiment.cfg)
            )
            return experiment.make_trainer(self.run, called, self.processes)
        several = {"processes": self.processes, "token": self.token}
        if self.processes is None:
            self._check_devices()
        elif not self.processes.leader:
            return experiment.make_remote_runner(weights, **several, host=ray.util.get_node_ip_address())
        began, verifier = psutil.Process().create_time(), services.verifiers[""]
        return experiment.make_worker(
            self.name, self.run, services.controller, weights, verifier, began=began, **several
        )

    def _build_group(self, experiment: RLExperiment) -> Any:
        """Build the roles of all policies of an experiment that has several."""
        roles = PolicyRoles(experiment, self.run)
        if self.kind == "parameter_server":
            return roles.make_parameter_server(self.token)
        if self.kind == "verifier":
            return roles.make_verifier()
        if self.kind == "controller":
            return roles.make_controller()
        services = self.connected(experiment)
        if self.kind == "trainer":
            return roles.make_trainer(services.controller, services.controller.of, services.weights)
        self._check_devices()
        began = psutil.Process().create_time()
        return roles.make_worker(self.name, services.controller, services.weights, services.verifiers, began)

    def _reference(self, experiment: RLExperiment) -> Any:
        return connect_reference(self.name, self.services, experiment.cfg, self.events)

    def joined(self, cfg: RLExperiment.Config, meeting: str) -> ProcessGroup:
        """Join the other processes of this role, if there are several, and open this one's devices."""
        names = next((names for names in process_groups(cfg)[self.kind] if self.name in names), [self.kind])
        timeouts = cfg.timeouts
        if len(names) > 1:
            index = names.index(self.name)
            os.environ |= self._slice_variables(meeting, index)
            beyond = timeouts.unresponsive + CALL_MARGIN  # the driver kills unresponsive processes before that
            join(meeting, index, len(names), role=names[0], timeout=beyond, heartbeat=beyond)
        self._check_devices()

        def on_wait(who: str, seconds: float) -> None:
            what = f"{who} to reach the same step"
            self.events.append(self.name, "waiting", who=self.name, what=what, seconds=round(seconds, 1))

        return ProcessGroup(names[0], on_wait=on_wait, warn_after=timeouts.warn_after, limit=2 * timeouts.batch)

    def _slice_variables(self, meeting: str, index: int) -> dict[str, str]:
        """Return the variables by which libtpu joins several slices to one program; empty for one slice."""
        if self.request is None or self.request.slices == 1:
            return {}
        host = meeting.rpartition(":")[0]
        return get_tpu_coordinator_env_vars(host, self.request.slices, index // self.request.hosts_per_slice)

    def _check_devices(self) -> None:
        if self.request is not None:
            check_opened(self.request, jax.local_devices())

    def _build_server(self, experiment: RLExperiment) -> ParameterServer:
        names = server_names(experiment.cfg)
        index = names.index(self.name)
        others = [self._shard(name) for name in names[1:]] if index == 0 else []
        return experiment.make_parameter_server(index=index, others=others, token=self.token)

    def _shard(self, name: str) -> ShardServer:
        """Connect the directory to a shard server. It never waits: a dead one must be an error at once."""
        locate = partial(_endpoint, name, lambda: ray.get_actor(name, self.namespace))
        return remote_shard_server(RpcClient(locate, name=name, connect_timeout=_SHARD_TIMEOUT, retry_timeout=0.0))

    def _trainer_states(self, cfg: RLExperiment.Config) -> TrainerStates | None:
        """Return the states that this process holds or sends to the standby; None: the experiment has no standby."""
        name = spare_names(cfg)["trainer"]
        if not name:
            return None
        locate = partial(_endpoint, name[0], lambda: self.services[name[0]])
        standby = connect(states_config(cfg), [locate], retry_timeout=0.0, connect_timeout=_SHARD_TIMEOUT)
        return TrainerStates(self.states, standby, self.events)


def _endpoint(name: str, actor: Callable[[], Any]) -> Endpoint:
    """Return where the process of an actor listens (WeightsError: it does not)."""
    try:
        return result(actor().invoke.remote("endpoint"), _SHARD_TIMEOUT)
    except (RayError, ValueError) as error:
        raise WeightsError(f"{name} is not running: {error}") from error
