"""Importance: detached weights pi_old / mu for tokens that another policy drew.

mu drew the tokens (an older version, or the same weights on other kernels), pi_old is the
trainer's policy at the start of the update. This ratio is not the one that a surrogate clips
(pi / pi_old): it corrects *whose* samples these are, multiplies the weight of a token, and
carries no gradient.
"""

# jax's own types are partial (`ones_like`, `zeros_like`).
# pyright: reportUnknownMemberType=false

from typing import Literal, override

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, Configurable
from rl.objective.tokens import Tokens, masked_mean, safe_exp

Level = Literal["token", "geometric", "sequence"]


class Importance(Configurable):
    """Map from tokens to (weight [..., T], bool [..., T] where the weight was limited)."""

    class Config(ConfigBase["Importance"]):
        pass

    drops: bool = False  # some weights may be zero

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """Return the weights and where they were limited."""
        raise NotImplementedError


class NoImportance(Importance):
    """Weight one: mu is taken to be pi_old."""

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return jnp.ones_like(tokens.new), jnp.zeros_like(tokens.mask)


class TruncatedImportance(Importance):
    """pi_old / mu, limited to [floor, cap] (truncated importance sampling).

    level: "token" is the ratio of each token; "geometric" the geometric mean over the rollout;
        "sequence" the product over the rollout (unbiased before truncation, high variance).
    mode: "clip" limits the weight; "mask" sets it to zero outside the range, which drops the
        token (or the rollout) from the numerator. The denominator stays: it was fixed by the
        aggregation.
    """

    class Config(Importance.Config):
        level: Level = "token"
        mode: Literal["clip", "mask"] = "clip"
        cap: float = 2.0
        floor: float = 0.0

        @override
        def check_fields(self) -> None:
            self.require("floor", 0.0 <= self.floor <= 1.0, "0 to 1")
            self.require_least(1, "cap")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.level: Level = cfg.level
        self.mode, self.cap, self.floor = cfg.mode, cfg.cap, cfg.floor
        self.drops = cfg.mode == "mask"

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        ratio = _ratio(tokens, self.level)
        limited = (ratio > self.cap) | (ratio < self.floor)
        if self.mode == "mask":
            return jnp.where(limited, 0.0, ratio), limited
        return jnp.clip(ratio, self.floor, self.cap), limited


class RolloutRejection(Importance):
    """Weight zero for all tokens of a rollout that mu drew too differently; `weights` are those of the others.

    level: "geometric" judges the geometric mean of pi_old / mu over the rollout, "sequence" the product, "token" the
        ratio of every token: one outside [floor, cap] rejects the rollout (sequence-masked importance sampling).
    As in the mask above the denominator stays: a batch of which much is rejected makes a smaller step.
    """

    class Config(Importance.Config):
        level: Level = "geometric"
        cap: float = 2.0
        floor: float = 0.5
        weights: ConfigBase[Importance] = NoImportance.Config()

        @override
        def check_fields(self) -> None:
            self.require("floor", 0.0 <= self.floor <= 1.0, "0 to 1")
            self.require_least(1, "cap")

    drops = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.level: Level = cfg.level
        self.cap, self.floor = cfg.cap, cfg.floor
        self.weights: Importance = cfg.weights.build()

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        ratio = _ratio(tokens, self.level)
        outside = tokens.mask & ((ratio > self.cap) | (ratio < self.floor))
        rejected = jnp.broadcast_to(jnp.any(outside, axis=-1, keepdims=True), outside.shape)
        weights, limited = self.weights(tokens)
        return jnp.where(rejected, 0.0, weights), limited | rejected


def _ratio(tokens: Tokens, level: Level) -> jax.Array:
    """pi_old / mu of each token, or of its rollout as a geometric mean or a product; constant, [..., T]."""
    log_ratio = jax.lax.stop_gradient(tokens.old - tokens.behaviour)
    if level == "geometric":
        log_ratio = masked_mean(log_ratio, tokens.mask)
    elif level == "sequence":
        log_ratio = jnp.sum(log_ratio, axis=-1, keepdims=True)
    return jnp.broadcast_to(safe_exp(log_ratio), tokens.new.shape)
