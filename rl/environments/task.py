"""A task whose problems are solved in an environment: any source of problems, with one."""

import dataclasses
from collections.abc import Iterator
from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase
from rl.environments.environment import Environment
from rl.protocol.messages import Problem
from rl.tasks.source import ProblemSource

__all__ = ["EnvironmentTask"]


class EnvironmentTask(ProblemSource):
    """The problems of `source`, each an episode of `environment`. Train, held-out and scores are the source's."""

    class Config(ProblemSource.Config):
        source: ProblemSource.Config = REQUIRED
        environment: Environment.Config = REQUIRED

        @property
        @override
        def title(self) -> str:
            return self.label or self.source.title

    def __init__(self, cfg: Config, *, seed: int):
        super().__init__(cfg)
        self._environment = cfg.environment
        self._source: ProblemSource = cfg.source.clone(label=cfg.title).build(seed=seed)

    @property
    @override
    def environment(self) -> Environment.Config:
        return self._environment

    @override
    def make(self, item: int, problem_id: int) -> Problem:
        problem = self._environment.prepare(self._source.make(item, problem_id))
        return dataclasses.replace(problem, family=self.label)

    @override
    def candidates(self, turn: int) -> Iterator[int]:
        return self._source.candidates(turn)

    @override
    def heldout_candidates(self, wanted: int, heldout_every: int) -> Iterator[int]:
        return self._source.heldout_candidates(wanted, heldout_every)

    @override
    def is_heldout(self, problem: Problem, heldout_every: int) -> bool:
        return self._source.is_heldout(problem, heldout_every)

    @override
    def score(self, answer: str, entry: dict[str, Any]) -> float:
        return self._source.score(answer, entry)

    @override
    def canonical(self, item: int) -> int:
        return self._source.canonical(item)

    @property
    @override
    def heldout_size(self) -> int | None:
        return self._source.heldout_size

    @override
    def vote(self, answer: str) -> str:
        return self._source.vote(answer)

    @override
    def form(self, answer: str) -> str | None:
        return self._source.form(answer)

    @override
    def split(self, heldout_every: int) -> None:
        self._source.split(heldout_every)

    @property
    @override
    def digest(self) -> str:
        return self._source.digest

    @property
    @override
    def widen(self) -> str:
        return self._source.widen

    @property
    @override
    def has_answers(self) -> bool:
        return self._source.has_answers


def environments_of(tasks: ConfigBase[Any]) -> list[Environment.Config]:
    """Return the environments that tasks name."""
    families = getattr(tasks, "families", ())
    return [family.environment for family in families if isinstance(family, EnvironmentTask.Config)]
