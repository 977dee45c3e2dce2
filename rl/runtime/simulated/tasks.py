"""Tasks of a simulated run: some problems of each family are made, and stand for all others."""

import dataclasses
from typing import override

from axlearn_like.config import config_items
from rl.protocol.messages import Problem
from rl.tasks.mixture import TaskMixture


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
