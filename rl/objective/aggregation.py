"""Aggregation: how much each token of the *global* batch counts.

Every class maps the mask of the tokens that count, [N, T], and the group of each rollout, [N],
to weights [N, T], so that the objective is a plain weighted sum over tokens. A sum is additive:
splitting the batch into micro-batches, padding it or sharding it changes nothing. Dividing
inside a micro-batch instead (a mean of means) changes the gradient whenever lengths differ.

Only rollouts with at least one counted token enter a denominator. Where the paper averages over the rollouts of a
prompt and then over prompts, so do these classes: a rollout of a group of 3 counts more than one of a group of 7,
however the groups became uneven (a verifier failed, truncated rollouts are masked).
"""

from typing import override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from mesh.errors import UserError
from rl.protocol.experiment import ExperimentFields


class Aggregation(Configurable):
    """Weight of each token in the loss, computed from the masks of the whole batch on the host, in float64."""

    class Config(ConfigBase["Aggregation"]):
        pass

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Weights float64[N, T], zero outside `mask`.

        Args:
            mask: bool[N, T], sampled tokens of the rollouts that take part.
            groups: int[N], the group (prompt) of each rollout, in 0..G-1.
        """
        raise NotImplementedError


def _rollouts_in_mean(mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """int64[N, 1]: prompts x rollouts of this prompt, which divides a mean over rollouts and then over prompts."""
    rollouts = np.bincount(groups[mask.any(axis=1)], minlength=1 + int(groups.max(initial=0)))
    prompts = int((rollouts > 0).sum())
    return np.maximum(prompts * rollouts, 1)[groups][:, None]


class TokenMean(Aggregation):
    """1 / number of tokens in the global batch: every token counts the same (DAPO)."""

    @override
    def __call__(self, mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return mask / max(int(mask.sum()), 1)


class SequenceMean(Aggregation):
    """1 / (P G_p |o_i|): mean over the tokens of a rollout, over the rollouts of a prompt, over prompts (GRPO)."""

    @override
    def __call__(self, mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
        lengths = mask.sum(axis=1)
        return mask / np.maximum(lengths, 1)[:, None] / _rollouts_in_mean(mask, groups)


class PromptMean(Aggregation):
    """1 / (P sum_i |o_i|): mean over the tokens of a group, then over groups (ScaleRL)."""

    @override
    def __call__(self, mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
        tokens = np.bincount(groups, weights=mask.sum(axis=1), minlength=1)
        prompts = max(int((tokens > 0).sum()), 1)
        return mask / np.maximum(tokens, 1)[groups][:, None] / prompts


class SequenceSum(Aggregation):
    """1 / (P G_p): log-probability of the whole rollout, mean over a prompt's, over prompts (REINFORCE, RLOO)."""

    @override
    def __call__(self, mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return mask / _rollouts_in_mean(mask, groups)


class MaxLengthMean(Aggregation):
    """1 / (P G_p max_length): as `SequenceSum` with a constant divisor (Dr.GRPO)."""

    class Config(Aggregation.Config):
        max_length: int = REQUIRED  # the generation limit in tokens, not this batch's longest

        @override
        def check_fields(self) -> None:
            self.require_least(1, "max_length")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse a divisor below the tokens that a rollout may have."""
            max_new = experiment.max_new_tokens
            fits = self.max_length >= max_new
            self.require("max_length", fits, f"max_new_tokens={max_new} or more: rollouts may have as many tokens")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.max_length = cfg.max_length

    @override
    def __call__(self, mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
        longest = int(mask.sum(axis=1).max(initial=0))
        if longest > self.max_length:
            raise UserError(
                f"a rollout of {longest} sampled tokens exceeds MaxLengthMean.Config.max_length={self.max_length}"
            )
        return mask / (_rollouts_in_mean(mask, groups) * self.max_length)
