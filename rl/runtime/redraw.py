"""Rollouts that are drawn again: a rollout is a policy's version, a prompt and a sample, and all else follows.

The real worker draws and scores them; its leases and weights come from here.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from axlearn_like.layers.base import Params, build_abstract
from axlearn_like.run.events import EventLog
from rl.audit.rollout_ledger import RolloutName
from rl.experiment import RLExperiment
from rl.parameter_server.client import connect_local
from rl.protocol.messages import Group, Lease, Prompt, PullStats, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.weights import PlacedWeights, types_read
from rl.rollout.worker import RolloutWorker
from rl.rollout.worker_policy import WorkerServices


class _Leases:
    """Controller and parameter server of a worker that draws again; keeps what it submits."""

    def __init__(self, leases: Iterable[Lease], place: Callable[[int], PlacedWeights]):
        self._leases, self._place = list(leases), place
        self.drawn: list[tuple[Lease, Group]] = []
        self._lease: Lease | None = None

    def lease(self, worker: str, timeout: float = 0.0) -> Lease | None:
        self._lease = self._leases.pop(0) if self._leases else None
        return self._lease

    def submit(self, lease: int, groups: tuple[Group, ...]) -> bool:
        assert self._lease is not None
        self.drawn += [(self._lease, group) for group in groups]
        return True

    def join(self, worker: str) -> None: ...

    def leave(self, worker: str) -> None: ...

    def renew(self, lease: int) -> bool:
        return True

    def generated(self, lease: int) -> bool:
        return True

    def hand_back(self, lease: int, rollouts: tuple[Rollout, ...]) -> bool:
        return False

    def status(self) -> dict[str, Any]:
        return {"stopped": not self._leases}

    def take(self, version: int, timeout: float = 0.0) -> tuple[PlacedWeights, PullStats]:
        return self._place(version), PullStats()

    def newer(self) -> None:
        return None


class Redrawer:
    """An experiment's engine and verifier, with which rollouts of any of its versions are drawn again.

    Groups are drawn alone or with others, whole or a sample of them, with the same bits on hardware of one class.
    """

    def __init__(self, experiment: RLExperiment, *, engine: RolloutEngine | None = None):
        """Build the engine, unless there is one without unfinished requests."""
        self._experiment = experiment
        self._engine = engine or experiment.make_engine()
        self._tasks = experiment.cfg.tasks.build()
        self._maker = experiment.controller_cfg.prompt_maker(experiment.tokenizer)
        self._tasks.admission = self._maker

    def prompt(self, name: RolloutName) -> Prompt:
        """Return the prompt of a rollout, from the experiment's tasks."""
        return dataclasses.replace(self._maker.prompt(self._tasks.problem(name.prompt)), draw=name.draw)

    def draw(self, names: Sequence[RolloutName], weights: Callable[[int], Params]) -> dict[RolloutName, Group]:
        """Draw rollouts again and score them.

        Args:
            names: the rollouts, each once.
            weights: returns the parameters of a version, as the trainer has them; called once for each, in order.

        Returns:
            For each name a group of one rollout, with its score and its class of hardware.
        """
        together: dict[tuple[int, int], dict[int, list[int]]] = {}  # (version, draw) -> prompt -> samples
        for name in sorted(names):
            together.setdefault((name.version, name.draw), {}).setdefault(name.prompt, []).append(name.sample)
        leases = [self._lease(number, *key, chosen) for number, (key, chosen) in enumerate(together.items())]
        source = _Leases(leases, self._placing(weights))
        self._engine.invalidate_weights()
        with self._experiment.make_verifier() as verifier:
            nowhere = EventLog(Path("events.jsonl"), silent=True)
            policy = self._experiment.worker_policy(WorkerServices(source, source, verifier, nowhere))
            worker = RolloutWorker("redraw", self._engine, {"": policy})
            while worker.run_once():
                pass
        return {
            RolloutName(lease.version, group.prompt.id, rollout.sample_id, group.prompt.draw): dataclasses.replace(
                group, rollouts=(rollout,), scores=(score,)
            )
            for lease, group in source.drawn
            for rollout, score in zip(group.rollouts, group.scores, strict=True)
        }

    def _placing(self, weights: Callable[[int], Params]) -> Callable[[int], PlacedWeights]:
        """Return what places a version on the engine, by way of a parameter server, whose codec may round."""
        client = connect_local(self._experiment.make_parameter_server())
        unrounded = frozenset(build_abstract(self._experiment.cfg.policy).unrounded_paths())
        publisher = client.publisher(unrounded=unrounded, dtypes=types_read(self._experiment.engine_cfg))
        receiver = client.receiver(self._engine.runner.weights_like)

        def place(version: int) -> PlacedWeights:
            publisher.publish(publisher.copy(jax.tree.map(jax.numpy.asarray, weights(version)), version))
            return self._engine.place(receiver.pull(version, 0.0), receiver.approximations)

        return place

    def _lease(self, number: int, version: int, draw: int, chosen: dict[int, list[int]]) -> Lease:
        prompts = tuple(self.prompt(RolloutName(version, prompt, 0, draw)) for prompt in chosen)
        samples = self._experiment.cfg.samples_per_prompt
        again = {prompt: tuple(ids) for prompt, ids in chosen.items()}
        return Lease(number, version, prompts, samples, version, seconds=float("inf"), again=again)
