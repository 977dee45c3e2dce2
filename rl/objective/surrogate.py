"""Surrogates: the term whose gradient moves the policy, multiplied by the detached advantage.

The ratio here is pi / pi_old, the movement within one update. The clip of PPO,
min(r A, clip(r) A), equals A * min(r, 1 + high) for A > 0 and A * max(r, 1 - low) for A < 0, so
it too has the form sg[advantage] * surrogate; only the sign of A enters.
"""

# jax's own types are partial (`zeros_like`).
# pyright: reportUnknownMemberType=false

from typing import Literal, override

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, Configurable
from rl.objective.tokens import Tokens, masked_mean, safe_exp
from rl.protocol.experiment import ExperimentFields


def policy_ratio(tokens: Tokens, level: Literal["token", "sequence"]) -> jax.Array:
    """Pi / pi_old, [..., T], differentiable.

    "token": r_t. "sequence": the value of the geometric mean s over the rollout, with the
    gradient of its own token: sg[s] * pi_t / sg[pi_t]. Under a per-sequence mean this has exactly
    the gradient of s itself (GSPO, arXiv 2507.18071, GSPO-token).
    """
    log_ratio = tokens.new - tokens.old
    if level == "token":
        return safe_exp(log_ratio)
    mean = jax.lax.stop_gradient(masked_mean(log_ratio, tokens.mask))
    return safe_exp(mean) * jnp.exp(tokens.new - jax.lax.stop_gradient(tokens.new))


class Surrogate(Configurable):
    """Map from tokens to (surrogate [..., T], bool [..., T] where a limit is in force)."""

    class Config(ConfigBase["Surrogate"]):
        pass

    mixes: bool = False  # demonstrations have a term of their own

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """Return the surrogate and where its limit is in force."""
        raise NotImplementedError


class LogProbability(Surrogate):
    """log pi (REINFORCE)."""

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return tokens.new, jnp.zeros_like(tokens.mask)


class Ratio(Surrogate):
    """pi / pi_old without a limit."""

    class Config(Surrogate.Config):
        level: Literal["token", "sequence"] = "token"

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.level: Literal["token", "sequence"] = cfg.level

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return policy_ratio(tokens, self.level), jnp.zeros_like(tokens.mask)


class ClippedSurrogate(Surrogate):
    """PPO's clip to [1 - low, 1 + high], by token (PPO, GRPO, DAPO) or sequence (GSPO).

    dual: for A < 0 the ratio counts at most `dual` (> 1 + high; dual-clip PPO, arXiv
        1912.09729); 0 is off. Without it a single token of huge ratio and negative advantage
        has an unbounded gradient.
    """

    class Config(Surrogate.Config):
        low: float = 0.2
        high: float = 0.2
        dual: float = 0.0
        level: Literal["token", "sequence"] = "token"

        @override
        def check_fields(self) -> None:
            self.require_least(0, "low", "high")
            self.require("dual", not self.dual or self.dual > 1.0 + self.high, f"0, or above 1 + high={1 + self.high}")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.low, self.high, self.dual = cfg.low, cfg.high, cfg.dual
        self.level: Literal["token", "sequence"] = cfg.level

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        ratio = policy_ratio(tokens, self.level)
        good, bad = tokens.advantages > 0, tokens.advantages < 0
        over = good & (ratio > 1.0 + self.high)
        under = bad & (ratio < 1.0 - self.low)
        value = jnp.where(over, 1.0 + self.high, jnp.where(under, 1.0 - self.low, ratio))
        limited = over | under
        if self.dual:
            runaway = bad & (ratio > self.dual)
            value, limited = jnp.where(runaway, self.dual, value), limited | runaway
        return value, limited & tokens.mask


class ClippedWeightLogProbability(Surrogate):
    """sg[clip(pi / pi_old)] * log pi: every token keeps a gradient (CISPO, arXiv 2506.13585).

    The clip limits the weight, not the update. low >= 1 leaves the lower side open, as published.
    """

    class Config(Surrogate.Config):
        low: float = 1.0
        high: float = 0.28

        @override
        def check_fields(self) -> None:
            self.require_least(0, "low", "high")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.low, self.high = cfg.low, cfg.high

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        ratio = jax.lax.stop_gradient(policy_ratio(tokens, "token"))
        limited = (ratio > 1.0 + self.high) | (ratio < 1.0 - self.low)
        weight = jnp.clip(ratio, 1.0 - self.low, 1.0 + self.high)
        return weight * tokens.new, limited & tokens.mask


class SoftGate(Surrogate):
    """(4 / tau) sigmoid(tau (r - 1)) instead of a clip (SAPO, arXiv 2511.20347); by token.

    Its slope in r is 1 at r = 1 and falls smoothly on both sides, the faster the larger tau is. Tokens with A > 0 have
    `tau_pos`, the others `tau_neg`: what is made less likely raises many other tokens at once, so it is damped more.
    In force is the gate where it has taken more than half of the slope.
    """

    class Config(Surrogate.Config):
        tau_pos: float = 1.0
        tau_neg: float = 1.05

        @override
        def check_fields(self) -> None:
            for field in ("tau_pos", "tau_neg"):
                self.require(field, getattr(self, field) > 0, "a number above 0")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.tau_pos, self.tau_neg = cfg.tau_pos, cfg.tau_neg

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        tau = jnp.where(tokens.advantages > 0, self.tau_pos, self.tau_neg)
        gate = jax.nn.sigmoid(tau * (policy_ratio(tokens, "token") - 1.0))
        return 4.0 / tau * gate, (4.0 * gate * (1.0 - gate) < 0.5) & tokens.mask


class MixedPolicy(Surrogate):
    """Demonstrations among the rollouts of a group: pi / (pi + gamma) at their tokens (LUFFY, arXiv 2504.14945).

    The ratio of a demonstration's token is pi / phi. Who wrote it gave no probabilities, so phi is 1, as in the paper;
    the ratio is shaped, f(x) = x / (x + gamma), and never clipped. By log pi the slope is gamma pi / (pi + gamma)^2,
    greatest at pi = gamma: a token that the policy finds unlikely is learned too. `drawn` is the surrogate of the
    policy's own tokens.
    """

    class Config(Surrogate.Config):
        drawn: ConfigBase[Surrogate] = ClippedSurrogate.Config()
        gamma: float = 0.1

        @override
        def check_fields(self) -> None:
            self.require("gamma", self.gamma > 0, "a number above 0")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse to mix without demonstrations."""
            expected = (
                "GroupDemonstrations.Config() with objective.surrogate=MixedPolicy.Config(), which learns from them"
            )
            experiment.require("demonstrations", experiment.demonstrations is not None, expected)

    mixes: bool = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._drawn: Surrogate = cfg.drawn.build()
        self.gamma = cfg.gamma

    @override
    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        value, limited = self._drawn(tokens)
        if (given := tokens.demonstrations) is None:
            raise KeyError("batch['demonstrations'] is missing; MixedPolicy needs it")
        # pi / (pi + gamma) as a sigmoid: finite, and with the right slope, however unlikely the token is.
        shaped = jax.nn.sigmoid(tokens.new - jnp.log(self.gamma))
        return jnp.where(given, shaped, value), limited & ~given
