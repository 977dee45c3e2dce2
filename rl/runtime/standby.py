"""A standby of the trainer: the trainer's states in its memory, and the trainer's programs compiled in its process.

After each update the trainer sends its whole state by the transport of the weights, as one more version: parameters,
optimizer state, the versions that workers may still ask for, and the state of the plan. A standby that takes over is a
trainer that restores, as ever, but from its own memory. It has compiled all programs before, by an update of its own on
a state and a batch of the run, of which nothing remains.
"""

import json
import secrets
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.config import to_text
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.scratch import scratch
from mesh.devices import platform
from rl.controller.ledger import LedgerError
from rl.experiment import RLExperiment
from rl.parameter_server.client import ParameterServerClient, connect_local
from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.push.publisher import Publisher, Pusher
from rl.parameter_server.push.snapshot import Snapshot
from rl.parameter_server.server import ParameterServer
from rl.protocol.protocols import BatchSource
from rl.runtime.inprocess import remade_config
from rl.runtime.replay.sources import GivenBatch
from rl.training.spec import TrainerServices

KEPT = 2  # states held: the newest whole one, and the one that is on its way
_EXTRAS = "extras"  # name of the array with the JSON of a checkpoint
_BLOCK = 4096  # divides the bytes of the extras, whose arrays so have few shapes
_WAIT = 10.0  # seconds of one wait for a state, or for its batch
_PAUSE = 1.0  # seconds without copies after a state could not be sent


def states_config(cfg: RLExperiment.Config) -> ParameterServer.Config:
    """Return the config of the server that holds states: that of the weights, exact and in memory alone."""
    exact = {"codec": "raw", "offload": None, "peer_to_peer": False}
    return cfg.parameter_server.clone(keep=KEPT, shard_servers=1, port=0, **exact)


class TrainerStates:
    """States of a trainer: restored from those that this process holds, sent to another process after each update.

    The trainer waits for the copy to the host alone. A state that is due while the one before is still on its way, or
    while there is no standby, is left out.
    """

    def __init__(
        self,
        held: ParameterServer | None,
        standby: ParameterServerClient | None,
        events: EventLog,
        version: int | None = None,
    ):
        """Connect; `held`: states sent to this process; `standby`: where they go now; `version`: None: the newest."""
        self._version = version
        self.frozen: Collection[str] = ()
        self._held, self._standby, self._events = held, standby, events
        self._pusher = Pusher(secrets.token_hex(8))
        self._publisher: Publisher | None = None if standby is None else standby.publisher(pusher=self._pusher)
        self._thread = ThreadPoolExecutor(1, "state")
        self._sending: Future[None] | None = None
        self._last: Snapshot | None = None
        self._began = False  # the standby knows this trainer
        self._failed_at = -_PAUSE

    def latest_step(self) -> int | None:
        """Return the step of the newest whole state; None: there is none. From then on no other trainer sends any."""
        if self._version is not None or self._held is None:
            return self._version
        directory = _directory(self._held)
        directory.rewind(directory.latest(), self._pusher.trainer)
        return None if directory.latest() < 0 else directory.latest()

    def restore(self, abstract: Mapping[str, Any], step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state and extras of a step, verified by their fingerprints (WeightsError: they are not there)."""
        assert self._held is not None, "latest_step"
        leaves, tree = jax.tree_util.tree_flatten_with_path(dict(abstract))
        like = {path_name(path): leaf for path, leaf in leaves}
        spec = next(spec for spec in _directory(self._held).manifest(step).tensors if spec.path == _EXTRAS)
        whole = NamedSharding(leaves[0][1].sharding.mesh, PartitionSpec())
        wanted = {**like, _EXTRAS: jax.ShapeDtypeStruct(spec.shape, np.uint8, sharding=whole)}
        found = connect_local(self._held).receiver(wanted).pull(step)
        extras = json.loads(np.asarray(found[_EXTRAS]).tobytes())
        arrays = [found[name] for name in like]
        if platform() == "cpu":  # arrays may lie in the memory of the held state, which the step would overwrite
            arrays = [jnp.array(array, copy=True) for array in arrays]
        return jax.tree.unflatten(tree, arrays), extras

    def hold(self, step: int, state: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        """Copy a state to the host, and send it on a thread."""
        busy = self._sending is not None and not self._sending.done()
        if self._publisher is None or busy or self._events.clock() < self._failed_at + _PAUSE:
            return
        leaves = jax.tree_util.tree_leaves_with_path(dict(state))
        text = json.dumps(extras).encode()
        padded = np.frombuffer(text.ljust(-(-len(text) // _BLOCK) * _BLOCK), np.uint8)
        sharding = NamedSharding(leaves[0][1].sharding.mesh, PartitionSpec())
        arrays = {path_name(path): leaf for path, leaf in leaves} | {_EXTRAS: jax.device_put(padded, sharding)}
        self._last = self._publisher.copy(arrays, step, frozen=self.frozen, before=self._last)
        self._sending = self._thread.submit(self._send, self._last)

    def _send(self, snapshot: Snapshot) -> None:
        assert self._publisher is not None and self._standby is not None
        began = self._events.clock()
        try:
            if not self._began:
                self._standby.directory.rewind(snapshot.version, self._pusher.trainer)
            self._began = True
            self._publisher.publish(snapshot)
        except WeightsError:  # no standby now: the next one gets a later state
            self._began, self._failed_at = False, self._events.clock()
            return
        seconds = round(self._events.clock() - began, 4)
        self._events.append("trainer", "mirrored", version=snapshot.version, nbytes=snapshot.copied, seconds=seconds)


def rehearse(
    experiment: RLExperiment,
    run: RunDirectory,
    controller: BatchSource,
    held: ParameterServer,
    over: Callable[[], bool],
) -> None:
    """Make one update of the run aside, on its own state and batch, so that this process has all of its programs.

    Args:
        run: the run directory, which is only read.
        controller: the controller, of which batches are only read.
        held: states of the trainer.
        over: the process has taken over; nothing is made then.
    """
    cfg = remade_config(experiment.cfg)
    found = _next_batch(controller, _directory(held), over)
    if found is None:
        return
    version, source = found
    with scratch("standby") as folder, RunDirectory.open(folder / "run", to_text(cfg)) as aside:
        states = TrainerStates(held, None, EventLog(aside.events_path), version)
        services = TrainerServices(source, connect_local(cfg.parameter_server.build()), states=states)
        with cfg.build().make_trainer(aside, services, first=experiment.first_version(run)) as trainer:
            trainer.start()
            trainer.run_once()
            trainer.settle()


def _next_batch(
    controller: BatchSource, directory: Directory, over: Callable[[], bool]
) -> tuple[int, GivenBatch] | None:
    """Return the newest version whose state is held, and pinned here, with the batch that updates it."""
    version, wait = -1, _WAIT
    while not over():
        if (newest := directory.newer(version, wait)) < 0:
            continue
        if newest > version:
            directory.pin(version := newest)
        try:
            groups, plan = controller.next_batch(version, _WAIT), controller.plan_after(version)
        except LedgerError:  # the trainer was faster
            wait = _WAIT
            continue
        if groups is not None and plan is not None:
            return version, GivenBatch(version, groups, plan)
        wait = 0.0
    return None


def _directory(server: ParameterServer) -> Directory:
    assert server.directory is not None, "server 0 has it"
    return server.directory
