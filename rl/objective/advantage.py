"""Advantages: how much better each rollout was than expected; float64 on the host.

Every class maps rewards [N], the group of each rollout [N] and which rollouts take part [N] to
advantages [N], zero for those that do not. A group without spread gets exactly zero: rounding
in `r - mean` divided by a tiny eps would otherwise make a signal out of nothing.
"""

from collections.abc import Sequence
from typing import Literal, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from mesh.errors import UserError
from rl.protocol.experiment import ExperimentFields


def constant_groups(rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
    """bool[G]: groups whose live rewards are all equal (true for a group with none)."""
    count = int(groups.max(initial=-1)) + 1
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, groups[live], rewards[live])
    np.maximum.at(high, groups[live], rewards[live])
    return ~(high > low)


def _group_mean(values: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """float64[N]: the mean over each rollout's group by whole or boolean weights [N], 0 for those that are not live."""
    count = np.bincount(groups, weights=weights, minlength=1)
    total = np.bincount(groups, weights=np.where(weights > 0, values, 0.0) * weights, minlength=1)
    return (total / np.maximum(count, 1))[groups]


def _centre(rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Rewards less the mean of their group; exactly zero in constant groups and where dead."""
    flat = constant_groups(rewards, groups, live)[groups]
    return np.where(live & ~flat, rewards - _group_mean(rewards, groups, live), 0.0)


def _group_size(groups: np.ndarray, live: np.ndarray) -> np.ndarray:
    return np.bincount(groups, weights=live, minlength=1)[groups]


class NegativeReward(UserError):
    """A reward below 0 for an advantage that divides by the mean of the rewards."""


Turns = Sequence[Sequence[tuple[int, float]]]  # turns of each rollout in order: (end of the turn's tokens, reward)


class Advantage(Configurable):
    """Maps rewards to advantages.

    min_group_size: groups with fewer live rollouts are dropped before the call.
    group_relative: a group of equal rewards has no gradient, so that "drop zero-variance
        groups" means something.
    """

    class Config(ConfigBase["Advantage"]):
        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse groups that are smaller than those that it compares within."""
            built = self.build()
            expected = (
                f"{built.min_group_size} or more: {type(built).__name__} compares rollouts of one prompt and leaves "
                "out a prompt with fewer (objective.advantage=BatchAdvantage.Config() or RawReward.Config() needs no "
                "group)"
            )
            experiment.require("samples_per_prompt", experiment.samples_per_prompt >= built.min_group_size, expected)

    min_group_size: int = 2
    group_relative: bool = True
    by_turn: bool = False  # tokens of a rollout may have different advantages: see `of_tokens`
    by_node: bool = False  # turns of a rollout are a sample and the nodes of its plan
    needs_lengths: bool = False  # True if `of_rollouts` reads lengths
    needs_values: bool = False  # True if a critic's values are read
    learns_values: bool = False  # True if the policy's update trains a critic too
    needs_positive: bool = False  # True if rewards must be 0 or more

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        """float64[N] from rewards float64[N], groups int[N] in 0..G-1 and live bool[N]."""
        raise NotImplementedError

    def of_rollouts(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """float64[N], given `lengths` int[N] in sampled tokens too."""
        return self(rewards, groups, live)

    def keeps(self, rewards: np.ndarray) -> np.ndarray:
        """bool[N]: rollouts that may take part; others leave loss and denominator, but not the groups' statistics."""
        return np.ones(len(rewards), bool)

    def of_tokens(
        self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray, turns: Turns, length: int
    ) -> np.ndarray:
        """float64[N, length]: the advantage of each token of rollouts with these turns."""
        return np.repeat(self(rewards, groups, live)[:, None], length, axis=1)


class GroupAdvantage(Advantage):
    """(r - mean) / (std + eps) within the group (GRPO); without the division, Dr.GRPO.

    ddof: 0 divides the variance by n, 1 by n - 1. The paper does not say; libraries differ.
    """

    class Config(Advantage.Config):
        normalise_std: bool = True
        ddof: int = 0
        eps: float = 1e-6

        @override
        def check_fields(self) -> None:
            self.require("ddof", self.ddof in (0, 1), "0 or 1")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.normalise_std, self.eps = cfg.normalise_std, cfg.eps
        self.ddof = cfg.ddof

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        centred = _centre(rewards, groups, live)
        if not self.normalise_std:
            return centred
        squares = np.bincount(groups, weights=centred**2, minlength=1)[groups]
        variance = squares / np.maximum(_group_size(groups, live) - self.ddof, 1)
        return centred / (np.sqrt(variance) + self.eps)


class LeaveOneOutAdvantage(Advantage):
    """r_i - mean of the *other* rollouts of the group = n / (n - 1) (r_i - mean) (RLOO)."""

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        size = np.maximum(_group_size(groups, live), 2)
        return _centre(rewards, groups, live) * size / (size - 1)


class OptimalBaselineAdvantage(Advantage):
    """r - sum_j l_j r_j / sum_j l_j within the group, l being lengths in sampled tokens (OPO, arXiv 2505.23585).

    The baseline of least variance of the gradient is the mean of the rewards weighted by the squared norms of the
    scores, which are taken to be as the lengths. It is that of a sum over the tokens of a rollout (`SequenceSum`).
    """

    needs_lengths: bool = True

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        raise TypeError("OptimalBaselineAdvantage needs lengths: call of_rollouts")

    @override
    def of_rollouts(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        flat = constant_groups(rewards, groups, live)[groups]
        baseline = _group_mean(rewards, groups, np.where(live, lengths, 0))
        return np.where(live & ~flat, rewards - baseline, 0.0)


class SuccessNormalisedAdvantage(Advantage):
    """(r - mean) / mean within the group, 0 where nothing succeeded (MaxRL).

    The published derivation is for rewards in {0, 1}, where the mean is the success rate; a
    negative reward would let the denominator vanish or turn the sign, and is refused: before the run where a config
    says that there may be one (`rl/training/compatibility.py`), else when it comes: `arrange` names the
    answer, and the trainer saves the updates made.
    """

    needs_positive: bool = True

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        if np.any(rewards[live] < 0):
            raise NegativeReward(
                "objective.advantage: SuccessNormalisedAdvantage (MaxRL) needs rewards of 0 or more (meant: 0 or 1), "
                f"got {float(rewards[live].min())}; expected a reward that does not fall below 0, or another "
                "advantage, such as GroupAdvantage.Config()"
            )
        mean = _group_mean(rewards, groups, live)
        return _centre(rewards, groups, live) / np.where(mean > 0, mean, 1.0)


class BatchAdvantage(Advantage):
    """Divided by the standard deviation over the whole batch.

    centre="batch": (r - mean) / (std + eps) over all live rollouts (REINFORCE++); groups of one
        are fine.
    centre="group": the group mean is subtracted first, then divided by the batch deviation of
        the result (REINFORCE++ with baseline, ScaleRL).
    The statistics count rollouts, not tokens, and only those left after filtering.
    """

    class Config(Advantage.Config):
        centre: Literal["batch", "group"] = "batch"
        ddof: int = 0
        eps: float = 1e-8

        @override
        def check_fields(self) -> None:
            self.require("ddof", self.ddof in (0, 1), "0 or 1")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.by_group, self.eps = cfg.centre == "group", cfg.eps
        self.ddof = cfg.ddof
        self.min_group_size = 2 if self.by_group else 1
        self.group_relative = self.by_group

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        # Group-centred values have batch mean zero, so one formula serves both.
        centred = _centre(rewards, groups if self.by_group else np.zeros_like(groups), live)
        variance = (centred**2).sum() / max(int(live.sum()) - self.ddof, 1)
        return centred / (np.sqrt(variance) + self.eps)


class NoAdvantage(Advantage):
    """Zero: rewards are measured and nothing is learned from them, only from the regulariser."""

    min_group_size: int = 1
    group_relative: bool = False

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        return np.zeros(len(rewards))


class RawReward(Advantage):
    """r - baseline with a constant baseline (plain REINFORCE)."""

    class Config(Advantage.Config):
        baseline: float = 0.0

    min_group_size: int = 1
    group_relative: bool = False

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.baseline = cfg.baseline

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        return np.where(live, rewards - self.baseline, 0.0)


class AcceptedOnly(Advantage):
    """1 for rollouts with a reward of `at_least` or more; the others are not trained on (rejection sampling)."""

    class Config(Advantage.Config):
        at_least: float = 1.0

    min_group_size: int = 1
    group_relative: bool = False

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.at_least = cfg.at_least

    @override
    def keeps(self, rewards: np.ndarray) -> np.ndarray:
        return rewards >= self.at_least

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        return np.where(live, 1.0, 0.0)
