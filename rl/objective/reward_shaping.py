"""Shaping of rewards on the host, before they are normalised within groups."""

from typing import Literal, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from rl.protocol.experiment import ExperimentFields


class RewardShaping(Configurable):
    """Map from rewards and lengths of rollouts to the rewards from which advantages are computed."""

    class Config(ConfigBase["RewardShaping"]):
        pass

    needs_reference: bool = False
    by_token: bool = False  # `of_tokens` is added to the rewards of tokens, and `divergence` is None

    def __call__(self, rewards: np.ndarray, lengths: np.ndarray, divergence: np.ndarray | None = None) -> np.ndarray:
        """float64[N] from rewards [N], lengths [N] in sampled tokens, and `divergence` [N] if `needs_reference`.

        `divergence` is sum_t (log mu - log ref) of the sampled tokens of each rollout.
        """
        raise NotImplementedError

    def of_tokens(self, divergence: np.ndarray) -> np.ndarray:
        """float64[N, T], rewards of tokens, from their log mu - log ref."""
        raise NotImplementedError


class SoftOverlongPenalty(RewardShaping):
    """Reward with a soft penalty for length (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - buffer tokens, then linear to -1 at max_length, -1 beyond.
    """

    class Config(RewardShaping.Config):
        max_length: int = REQUIRED
        buffer: int = REQUIRED

        @override
        def check_fields(self) -> None:
            self.require("buffer", 0 < self.buffer <= self.max_length, f"1 to max_length={self.max_length}")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse a penalty that begins beyond the tokens that a rollout may have."""
            begins, max_new = self.max_length - self.buffer, experiment.max_new_tokens
            expected = f"less than buffer + max_new_tokens={self.buffer + max_new}: "
            expected += (
                f"no rollout has more than {max_new} tokens, so the penalty, which begins at {begins}, would never act"
            )
            self.require("max_length", begins < max_new, expected)

    def __init__(self, cfg: Config):
        self.max_length, self.buffer = cfg.max_length, cfg.buffer

    @override
    def __call__(self, rewards: np.ndarray, lengths: np.ndarray, divergence: np.ndarray | None = None) -> np.ndarray:
        over = (self.max_length - self.buffer - lengths) / self.buffer
        return rewards + np.clip(over, -1.0, 0.0)


class ReferencePenalty(RewardShaping):
    """r - coef * sum_t (log mu - log ref): KL to a reference in the reward, by k1 over the tokens of the rollout.

    As a reward k1 has the right gradient: on-policy, with a sum over the tokens (`SequenceSum`), what is subtracted has
    the expected gradient of coef * KL(pi || ref) of whole rollouts, whatever baseline the advantage takes. With stale
    rollouts mu is the policy that drew them. `then` shapes the result further.

    level: "token" leaves each token its own penalty, -coef * (log mu - log ref), so that no token is charged with those
        before it (PPO of InstructGPT, arXiv 2203.02155; REINFORCE++): the same expected gradient with less variance. It
        needs an advantage that credits tokens, `GeneralisedAdvantage` or `RewardToGo`.
    """

    class Config(RewardShaping.Config):
        coef: float = REQUIRED
        level: Literal["rollout", "token"] = "rollout"
        then: ConfigBase[RewardShaping] | None = None

    needs_reference = True

    def __init__(self, cfg: Config):
        self.coef, self.by_token = cfg.coef, cfg.level == "token"
        self.then: RewardShaping | None = None if cfg.then is None else cfg.then.build()

    @override
    def __call__(self, rewards: np.ndarray, lengths: np.ndarray, divergence: np.ndarray | None = None) -> np.ndarray:
        shaped = rewards if divergence is None else rewards - self.coef * divergence
        return shaped if self.then is None else self.then(shaped, lengths)

    @override
    def of_tokens(self, divergence: np.ndarray) -> np.ndarray:
        return -self.coef * divergence
