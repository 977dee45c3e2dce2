"""Credit by node: of a sample that has spawned others, each completion for itself."""

from typing import override

import numpy as np

from axlearn_like.config import ConfigBase
from rl.objective.advantage import Advantage, GroupAdvantage, Turns
from rl.protocol.experiment import ExperimentFields


class NodeAdvantage(Advantage):
    """Each node of a plan gets the advantage of its own reward, and the plan that of the sample's.

    Nodes of the same place are compared by `advantage` within the group, among the samples that have so many. Every
    other advantage gives all completions of a sample that of the sample's reward: credit by path.
    """

    class Config(Advantage.Config):
        advantage: ConfigBase[Advantage] = GroupAdvantage.Config()

        @override
        def check_fields(self) -> None:
            inner = self.advantage.build()
            alone = not (inner.needs_lengths or inner.needs_values or inner.by_turn)
            self.require("advantage", alone, "one of rewards alone, such as GroupAdvantage.Config()")

        @override
        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse rollouts without nodes, and nodes without a reward of their own."""
            super().requires(experiment)
            graph = experiment.graph
            fits = graph is not None and graph.node_reward is not None
            experiment.require("graph", fits, f"a graph with a node_reward for {type(self).__owner__.__name__}")

    by_turn: bool = True
    by_node: bool = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._inner: Advantage = cfg.advantage.build()
        self.min_group_size, self.group_relative = self._inner.min_group_size, self._inner.group_relative
        self.needs_positive = self._inner.needs_positive

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        return self._inner(rewards, groups, live)

    @override
    def of_tokens(
        self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray, turns: Turns, length: int
    ) -> np.ndarray:
        """float64[N, length]; `turns`: end and reward of the sample itself, and of each of its nodes behind it."""
        counts = np.asarray([max(1, len(each)) for each in turns])
        own = np.zeros((len(turns), int(counts.max(initial=1))))
        ends = np.full(own.shape, length)
        for row, each in enumerate(turns):
            own[row, : len(each)] = [reward for _, reward in each]
            ends[row, : len(each)] = [end for end, _ in each]
        own[:, 0] = rewards
        place, found = np.arange(length), np.zeros((len(turns), length))
        for node in range(own.shape[1]):
            taking = live & (counts > node)
            value = self._inner(np.where(taking, own[:, node], 0.0), groups, taking)
            first = ends[:, node - 1] if node else np.zeros(len(turns), int)
            inside = (place >= first[:, None]) & (place < ends[:, node, None]) & taking[:, None]
            found = np.where(inside, value[:, None], found)
        return found
