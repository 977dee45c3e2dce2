"""Rollouts of a global batch, checked and flattened: the input of advantages and weights."""

from typing import NamedTuple

import numpy as np

from rl.objective.advantage import Turns


class PerToken(NamedTuple):
    """Numbers of each token, float[..., T], where an objective needs them.

    Attributes:
        divergence: log mu - log ref, of a penalty in the reward.
        values: a critic's value of the state in which the token was drawn.
    """

    divergence: np.ndarray | None = None
    values: np.ndarray | None = None


class Rollouts(NamedTuple):
    """N rollouts of up to T tokens, in the order of the caller's arrays.

    shape: of the caller's arrays, with N elements.
    rewards: float64[N].
    mask: bool[N, T], true at tokens that the policy sampled.
    group: int[N], counted from 0.
    live: bool[N], what enters the statistics of the group and the loss.
    truncated: bool[N], cut off by the length limit.
    turns: of each rollout, (end of its tokens, reward).
    """

    shape: tuple[int, ...]
    rewards: np.ndarray
    mask: np.ndarray
    group: np.ndarray
    live: np.ndarray
    truncated: np.ndarray
    turns: Turns

    def only(self, chosen: np.ndarray) -> "Rollouts":
        """Return the same rollouts, of which those alone are live that are live and chosen (bool[N])."""
        return self._replace(live=self.live & chosen)

    def live_in_group(self) -> np.ndarray:
        """Count the live rollouts of each group, float64[groups]."""
        return np.bincount(self.group, weights=self.live, minlength=1)

    @property
    def live_tokens(self) -> np.ndarray:
        """Sampled tokens of live rollouts, bool[N, T]."""
        return self.mask & self.live[:, None]


def flatten(
    rewards: np.ndarray,
    action_mask: np.ndarray,
    groups: np.ndarray | None,
    truncated: np.ndarray | None,
    scored: np.ndarray | None,
    turns: Turns | None,
) -> Rollouts:
    """Check the arrays of `Objective.prepare` and flatten them; live are scored rollouts with a sampled token.

    Raises:
        ValueError: shapes disagree, a live reward is not finite, or `groups` is omitted and `rewards` is not 2-D.
    """
    rewards = np.asarray(rewards, np.float64)
    shape = rewards.shape
    if groups is None:
        if rewards.ndim != 2:
            raise ValueError(f"groups is needed for rewards of shape {shape} (not 2-D)")
        groups = np.broadcast_to(np.arange(len(rewards))[:, None], shape)
    action_mask = np.asarray(action_mask, bool)
    if action_mask.shape[:-1] != shape:
        raise ValueError(f"action_mask has shape {action_mask.shape}, expected {shape} + [T]")
    _check_shape("groups", np.shape(groups), shape)
    mask, raw = action_mask.reshape(-1, action_mask.shape[-1]), rewards.reshape(-1)
    live = _flags("scored", scored, True, shape) & mask.any(axis=1)
    if not np.isfinite(raw[live]).all():
        raise ValueError("a scored rollout has a reward that is not finite")
    return Rollouts(
        shape=shape,
        rewards=raw,
        mask=mask,
        group=np.unique(np.ravel(groups), return_inverse=True)[1].reshape(-1),
        live=live,
        truncated=_flags("truncated", truncated, False, shape),
        turns=[()] * len(raw) if turns is None else turns,
    )


def _flags(name: str, flags: np.ndarray | None, default: bool, shape: tuple[int, ...]) -> np.ndarray:
    if flags is None:
        return np.full(int(np.prod(shape)), default)
    _check_shape(name, np.shape(flags), shape)
    return np.array(flags, bool).reshape(-1)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError(f"{name} has shape {found}, expected {expected}")
