"""The services of a simulated run's roles: calls of the controller, tasks, scores, and the size of a version."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, override

import jax
import numpy as np

from axlearn_like.config import config_items
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.parameter_names import path_name
from rl.experiment import RLExperiment
from rl.protocol.messages import Problem, Score
from rl.rollout.model_runner.weights import types_read
from rl.runtime.simulated.lengths import share_of
from rl.runtime.simulated.weights import CORES, Links
from rl.tasks.mixture import TaskMixture

VERIFIER = "verifier"
_SCORES = Score(0.0), Score(1.0)


class RoleCalls:
    """The controller, for another role."""

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments, **named: self._call(method, *arguments, **named)


class SimulatedVerifier:
    """The verifier's processes, shared by all workers; half of the answers are right."""

    def __init__(self, links: Links):
        self._links = links

    def score(self, problem_ids: Sequence[int], answers: Sequence[str], details: Any = None) -> list[Score]:
        """Return a score for each answer, after the seconds that they take."""
        d = self._links.durations
        path = (VERIFIER,) if d.cores is None else (VERIFIER, CORES)
        self._links.flows.pass_through(path, d.score * len(problem_ids), d.verifiers)
        return [_SCORES[share_of(problem, n) < 0.5] for n, problem in enumerate(problem_ids)]


def policy_bytes(experiment: RLExperiment) -> float:
    """Return the bytes of a version as engines read it."""
    read = types_read(experiment.engine_cfg)
    leaves = jax.tree_util.tree_leaves_with_path(split(build_abstract(experiment.cfg.policy))[1])
    sizes = [(math.prod(leaf.shape), read(path_name(path), np.dtype(leaf.dtype))) for path, leaf in leaves]
    return float(sum(count * dtype.itemsize for count, dtype in sizes))


class RepeatedMixture(TaskMixture):
    """A mixture whose problems have the texts of the first ones: a prompt's length is all that a simulation needs."""

    class Config(TaskMixture.Config):
        distinct: int = 64  # problems of each family that are made

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._distinct, self._first = cfg.distinct, dict[tuple[int, int], Problem]()

    @override
    def new(self, family: int, turn: int) -> Problem:
        key = family, turn % self._distinct
        if key not in self._first:
            self._first[key] = super().new(*key)
        return dataclasses.replace(self._first[key], id=turn * len(self._families) + family)


def repeated(tasks: TaskMixture.Config) -> RepeatedMixture.Config:
    """Return the config of a mixture that repeats the first problems of another."""
    return RepeatedMixture.Config(**dict(config_items(tasks)))
