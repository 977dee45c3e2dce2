"""Credit by part of a rollout: by turn of an episode, by node of a plan."""

import abc
from typing import override

import numpy as np

from axlearn_like.config import ConfigBase
from rl.objective.advantage import Advantage, GroupAdvantage, Turns
from rl.protocol.experiment import ExperimentFields


class PartAdvantage(Advantage, abc.ABC):
    """Each part gets an advantage of its own reward.

    Parts of the same number are compared by `advantage` within the group, among the rollouts that have so many.
    """

    class Config(Advantage.Config):
        advantage: ConfigBase[Advantage] = GroupAdvantage.Config()

        @override
        def check_fields(self) -> None:
            inner = self.advantage.build()
            alone = not (inner.needs_lengths or inner.needs_values or inner.by_turn)
            expected = f"one of rewards alone, such as GroupAdvantage.Config(), not {type(inner).__name__}"
            self.require("advantage", alone, expected)

    by_turn: bool = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._inner: Advantage = cfg.advantage.build()
        self.min_group_size, self.group_relative = self._inner.min_group_size, self._inner.group_relative
        self.needs_positive = self._inner.needs_positive

    @abc.abstractmethod
    def rewards_of_parts(self, rewards: np.ndarray, given: np.ndarray) -> np.ndarray:
        """float64[N, parts] from the rewards [N] of rollouts and those that were given for each part [N, parts]."""

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        return self._inner(rewards, groups, live)

    @override
    def of_tokens(
        self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray, turns: Turns, length: int
    ) -> np.ndarray:
        counts = np.asarray([max(1, len(each)) for each in turns])
        given = np.zeros((len(turns), int(counts.max(initial=1))))
        ends = np.full(given.shape, length)
        for row, each in enumerate(turns):
            given[row, : len(each)] = [reward for _, reward in each]
            ends[row, : max(0, len(each) - 1)] = [end for end, _ in each[:-1]]  # the last one has the rest
        own = self.rewards_of_parts(rewards, given)
        place, found = np.arange(length), np.zeros((len(turns), length))
        for part in range(given.shape[1]):
            there = counts > part
            taking = live & there
            value = self._inner(np.where(taking, own[:, part], 0.0), groups, taking)
            first = ends[:, part - 1] if part else np.zeros(len(turns), int)
            inside = (place >= first[:, None]) & (place < ends[:, part, None]) & there[:, None]
            found = np.where(inside, value[:, None], found)
        return found


class TurnAdvantage(PartAdvantage):
    """Credit by turn: each turn of an episode gets the advantage of the reward from it on (its return).

    What came before a turn is no credit of it; the verifier's score comes with the last. A rollout that is no episode
    is one turn.
    """

    @override
    def rewards_of_parts(self, rewards: np.ndarray, given: np.ndarray) -> np.ndarray:
        return rewards[:, None] - (np.cumsum(given, axis=1) - given)


class NodeAdvantage(PartAdvantage):
    """Credit by node: each node of a plan gets the advantage of its own reward, and the plan that of the sample's.

    Every other advantage gives all completions of a sample that of the sample's reward: credit by path.
    """

    class Config(PartAdvantage.Config):
        @override
        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse rollouts without nodes, and nodes without a reward of their own."""
            super().requires(experiment)
            graph = experiment.graph
            fits = graph is not None and graph.node_reward is not None
            experiment.require("graph", fits, f"a graph with a node_reward for {type(self).__owner__.__name__}")

    by_node: bool = True

    @override
    def rewards_of_parts(self, rewards: np.ndarray, given: np.ndarray) -> np.ndarray:
        return np.concatenate([rewards[:, None], given[:, 1:]], axis=1)
