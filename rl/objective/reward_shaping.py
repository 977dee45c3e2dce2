"""Shaping of rewards on the host, before they are normalised within groups."""

from typing import override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable


class RewardShaping(Configurable):
    """Map from rewards and lengths of rollouts to the rewards from which advantages are computed."""

    class Config(ConfigBase["RewardShaping"]):
        pass

    def __call__(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """float64[N] from rewards [N] and lengths [N] in sampled tokens."""
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

    def __init__(self, cfg: Config):
        self.max_length, self.buffer = cfg.max_length, cfg.buffer

    @override
    def __call__(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        over = (self.max_length - self.buffer - lengths) / self.buffer
        return rewards + np.clip(over, -1.0, 0.0)
