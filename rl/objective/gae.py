"""Generalised advantage estimation: per-token advantages from a critic's values; float64 on the host.

Steps are the tokens that the policy sampled: what tools and environments write in between is skipped, as part of the
next state. The reward is that of the rollout, at its last sampled token. Behind it the value is 0, for a rollout that
was cut off too: the length limit is part of the task.
"""

from typing import Any, NamedTuple, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase
from rl.objective.advantage import Advantage


class TokenAdvantages(NamedTuple):
    """Advantages and the critic's targets, float64 [N, T]; zero where nothing was sampled."""

    advantages: np.ndarray
    returns: np.ndarray


class GeneralisedAdvantage(Advantage):
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t (arXiv 1506.02438), of a critic's V.

    lam: 1 is reward less value, without bias; smaller trusts the critic's later values more.
    critic_lam: of the critic's targets, A + V; None: `lam`. With 1 they are the rewards themselves (VC-PPO, arXiv
        2503.01491: a value that is to reach back over a long rollout must not decay).
    length_adaptive: alpha of VAPO (arXiv 2504.05118): a rollout of l tokens has lam = 1 - 1 / (alpha l), and `lam` is
        not used; long rollouts keep more of their reward.
    whiten: subtracts the mean over the batch's sampled tokens, and divides by their standard deviation.
    """

    class Config(Advantage.Config):
        critic: ConfigBase[Any] = REQUIRED  # rl.training.critic.Critic.Config
        gamma: float = 1.0
        lam: float = 0.95
        critic_lam: float | None = None
        length_adaptive: float | None = None
        whiten: bool = True
        eps: float = 1e-8

        @override
        def check_fields(self) -> None:
            for field in ("gamma", "lam", "critic_lam"):
                value = getattr(self, field)
                self.require(field, value is None or 0 <= value <= 1, "a number from 0 to 1")
            self.require("length_adaptive", self.length_adaptive is None or self.length_adaptive > 0, "above 0")

    min_group_size: int = 1
    group_relative: bool = False
    needs_values: bool = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        raise TypeError("GeneralisedAdvantage needs values: call of_values")

    def of_values(self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, live: np.ndarray) -> TokenAdvantages:
        """Return the advantages of tokens.

        Args:
            rewards: float64 [N].
            values: float64 [N, T], of the state in which each token was drawn.
            mask: bool [N, T], tokens that the policy sampled.
            live: bool [N], rollouts that take part.
        """
        cfg, mask = self._cfg, mask & live[:, None]
        lengths = mask.sum(axis=1)
        lam = np.full(len(rewards), cfg.lam)
        if cfg.length_adaptive is not None:
            lam = np.maximum(1 - 1 / (cfg.length_adaptive * np.maximum(lengths, 1)), 0.0)
        advantages = _estimate(rewards, values, mask, cfg.gamma, lam)
        targets = advantages
        if cfg.critic_lam is not None or cfg.length_adaptive is not None:
            its = cfg.lam if cfg.critic_lam is None else cfg.critic_lam
            targets = _estimate(rewards, values, mask, cfg.gamma, np.full(len(rewards), its))
        returns = np.where(mask, targets + values, 0.0)
        if cfg.whiten and mask.any():
            of_tokens = advantages[mask]
            spread = of_tokens.std()
            # Advantages that are all alike say nothing about any token: rounding must not become a signal.
            flat = spread <= 1e-9 * max(1.0, float(np.abs(of_tokens).max()))
            whitened = np.zeros_like(of_tokens) if flat else (of_tokens - of_tokens.mean()) / (spread + cfg.eps)
            advantages = np.zeros_like(advantages)
            advantages[mask] = whitened
        return TokenAdvantages(advantages, returns)


def _estimate(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: np.ndarray) -> np.ndarray:
    """Return unwhitened advantages, float64 [N, T]."""
    rollouts, length = mask.shape
    found = np.zeros((rollouts, length))
    later, advantage, left = np.zeros(rollouts), np.zeros(rollouts), np.array(rewards, np.float64)
    for t in reversed(range(length)):
        here = mask[:, t]
        delta = left + gamma * later - values[:, t]
        advantage = np.where(here, delta + gamma * lam * advantage, advantage)
        later = np.where(here, values[:, t], later)
        left = np.where(here, 0.0, left)  # the reward is the last sampled token's
        found[:, t] = np.where(here, advantage, 0.0)
    return found
