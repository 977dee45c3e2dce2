"""Advantages of tokens from rewards of tokens, with a critic's values or without; float64 on the host.

Steps are the tokens that the policy sampled: what tools and environments write in between is skipped, as part of the
next state. The reward of the rollout is at its last sampled token, a penalty by token (`ReferencePenalty`) at its own.
Behind the last token the value is 0, for a rollout that was cut off too: the length limit is part of the task.
"""

from typing import Any, NamedTuple, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase
from rl.objective.advantage import Advantage


class TokenAdvantages(NamedTuple):
    """Advantages and the critic's targets, float64 [N, T]; zero where nothing was sampled."""

    advantages: np.ndarray
    returns: np.ndarray


class TokenCredit(Advantage):
    """Base of advantages that credit each token with the rewards from it on."""

    min_group_size: int = 1
    group_relative: bool = False

    @override
    def __call__(self, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
        raise TypeError(f"{type(self).__name__} takes rewards of tokens: call of_values")

    def of_values(self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, live: np.ndarray) -> TokenAdvantages:
        """Return the advantages of tokens.

        Args:
            rewards: float64 [N, T], for each token; see `at_last_token`.
            values: float64 [N, T], of the state in which each token was drawn; zero without a critic.
            mask: bool [N, T], tokens that the policy sampled.
            live: bool [N], rollouts that take part.
        """
        raise NotImplementedError


class RewardToGo(TokenCredit):
    """A_t = sum_k gamma^k r_{t+k}, without a critic (REINFORCE++, arXiv 2501.03262).

    With rewards of rollouts alone and gamma 1 all tokens of a rollout have its reward.

    whiten: subtracts the mean over the batch's sampled tokens, and divides by their standard deviation.
    """

    class Config(TokenCredit.Config):
        gamma: float = 1.0
        whiten: bool = True
        eps: float = 1e-8

        @override
        def check_fields(self) -> None:
            self.require("gamma", 0 <= self.gamma <= 1, "a number from 0 to 1")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg

    @override
    def of_values(self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, live: np.ndarray) -> TokenAdvantages:
        mask = mask & live[:, None]
        returns = _estimate(rewards, np.zeros(mask.shape), mask, self._cfg.gamma, np.ones(len(rewards)))
        return TokenAdvantages(_whitened(returns, mask, self._cfg.eps) if self._cfg.whiten else returns, returns)


class CriticConfig[T](ConfigBase[T]):
    """Base of configs of critics (rl/training/critic)."""

    @property
    def in_update(self) -> bool:
        """True if the values are learned in the policy's own update, by the arrays of the objective."""
        return False


class GeneralisedAdvantage(TokenCredit):
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t (arXiv 1506.02438), of a critic's V.

    lam: 1 is reward less value, without bias; smaller trusts the critic's later values more.
    critic_lam: of the critic's targets, A + V; None: `lam`. With 1 they are the rewards themselves (VC-PPO, arXiv
        2503.01491: a value that is to reach back over a long rollout must not decay).
    length_adaptive: alpha of VAPO (arXiv 2504.05118): a rollout of l tokens has lam = 1 - 1 / (alpha l), and `lam` is
        not used; long rollouts keep more of their reward.
    whiten: subtracts the mean over the batch's sampled tokens, and divides by their standard deviation.
    """

    class Config(TokenCredit.Config):
        critic: CriticConfig[Any] = REQUIRED  # Critic.Config or SharedCritic.Config of rl.training.critic
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

    needs_values: bool = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg, self.learns_values = cfg, cfg.critic.in_update

    @override
    def of_values(self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, live: np.ndarray) -> TokenAdvantages:
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
        return TokenAdvantages(_whitened(advantages, mask, cfg.eps) if cfg.whiten else advantages, returns)


def at_last_token(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return rewards of rollouts [N] as rewards of tokens [N, T]: each at its rollout's last token under the mask."""
    placed = np.zeros(mask.shape)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    placed[np.arange(len(mask)), last] = rewards
    return np.where(mask, placed, 0.0)


def _whitened(advantages: np.ndarray, mask: np.ndarray, eps: float) -> np.ndarray:
    """Return advantages of mean 0 and deviation 1 over the mask, zero outside of it and where they are all alike."""
    found, of_tokens = np.zeros_like(advantages), advantages[mask]
    spread = float(of_tokens.std()) if of_tokens.size else 0.0
    # Advantages that are all alike say nothing about any token: rounding must not become a signal.
    if spread > 1e-9 * max(1.0, float(np.abs(of_tokens).max(initial=0.0))):
        found[mask] = (of_tokens - of_tokens.mean()) / (spread + eps)
    return found


def _estimate(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: np.ndarray) -> np.ndarray:
    """Return unwhitened advantages, float64 [N, T], from rewards and values of tokens [N, T]."""
    rollouts, length = mask.shape
    found = np.zeros((rollouts, length))
    later, advantage = np.zeros(rollouts), np.zeros(rollouts)
    for t in reversed(range(length)):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * later - values[:, t]
        advantage = np.where(here, delta + gamma * lam * advantage, advantage)
        later = np.where(here, values[:, t], later)
        found[:, t] = np.where(here, advantage, 0.0)
    return found
