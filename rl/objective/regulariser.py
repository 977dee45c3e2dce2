"""Regularisers: terms added to the objective that do not depend on the reward.

For d = log pi - log pi_ref on tokens drawn from pi (Schulman, "Approximating KL divergence"):
    k1 = d                      unbiased for KL(pi || ref), but its *gradient* has mean zero
    k2 = d^2 / 2                its gradient is that of KL(pi || ref): use it as a loss
    k3 = exp(-d) - 1 + d        unbiased, low variance, >= 0; its gradient is that of
                                KL(ref || pi) (used by GRPO as published)
k1 as a loss regularises nothing and only adds noise; subtract it from the reward instead.

"exact" is KL(pi || ref) of the distributions over all words at each position, not of the token that was drawn: its
gradient has no variance from the draw, and it takes the reference's hidden states and head in place of a number.
"""

# jax's own types are partial (`zeros_like`).
# pyright: reportUnknownMemberType=false

from typing import Literal, override

import jax
import jax.numpy as jnp

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from rl.objective.tokens import Tokens, safe_exp


def kl_k1(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """Log pi - log ref: a value (for a reward or a plot), never a loss."""
    return logprobs - reference


def kl_k2(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """(log pi - log ref)^2 / 2."""
    return 0.5 * jnp.square(logprobs - reference)


def kl_k3(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """Ref / pi - 1 - log(ref / pi), with the exponent clamped."""
    difference = reference - logprobs
    return safe_exp(difference) - 1.0 - difference


class Regulariser(Configurable):
    """Map from tokens to the term added to J, [..., T]."""

    class Config(ConfigBase["Regulariser"]):
        pass

    needs_reference: bool = False
    needs_exact_kl: bool = False

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, tokens: Tokens) -> jax.Array:
        """Return the term."""
        raise NotImplementedError


class NoRegulariser(Regulariser):
    """No term."""

    @override
    def __call__(self, tokens: Tokens) -> jax.Array:
        return jnp.zeros_like(tokens.new)


class ReferenceKL(Regulariser):
    """-coef * KL(pi || ref), estimated per token, or exact; an estimate needs batch["logprobs_reference"].

    ratio: what multiplies the estimate. "none" is right on the first step from on-policy
        tokens. "detached" is sg[pi / pi_old]: with k2, the gradient of KL(pi || ref) also after
        the policy has moved. "differentiated" keeps the gradient of pi / pi_old: with k3, an
        unbiased value *and* an unbiased gradient of KL(pi || ref).
    """

    class Config(Regulariser.Config):
        coef: float = REQUIRED
        estimator: Literal["k1", "k2", "k3", "exact"] = "k2"
        ratio: Literal["none", "detached", "differentiated"] = "none"

        @override
        def check_fields(self) -> None:
            self.require_least(0, "coef")
            self.require(
                "estimator",
                self.estimator != "k1",
                "'k2', 'k3' or 'exact', or kl_k1 subtracted from the reward: the gradient of log pi - log ref has mean "
                "zero, so as a loss it would not hold the policy near the reference",
            )
            drawn = self.estimator != "exact" or self.ratio == "none"
            self.require("ratio", drawn, "'none' with estimator='exact', which is of no token that was drawn")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.needs_exact_kl = cfg.estimator == "exact"
        self.needs_reference = not self.needs_exact_kl
        self.coef, self.ratio = cfg.coef, cfg.ratio
        self.estimate = kl_k2 if cfg.estimator == "k2" else kl_k3

    @override
    def __call__(self, tokens: Tokens) -> jax.Array:
        if self.needs_exact_kl:
            if tokens.kl is None:
                raise ValueError("ReferenceKL(estimator='exact') needs Objective.loss(..., kl=[..., T])")
            return -self.coef * tokens.kl
        if tokens.reference is None:
            raise KeyError("batch['logprobs_reference'] is missing; ReferenceKL needs it")
        value = self.estimate(tokens.new, tokens.reference)
        if self.ratio != "none":
            ratio = safe_exp(tokens.new - tokens.old)
            value *= ratio if self.ratio == "differentiated" else jax.lax.stop_gradient(ratio)
        return -self.coef * value


class EntropyBonus(Regulariser):
    """+coef * entropy; needs the entropy of pi at each position from the caller."""

    class Config(Regulariser.Config):
        coef: float = REQUIRED

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.coef = cfg.coef

    @override
    def __call__(self, tokens: Tokens) -> jax.Array:
        if tokens.entropy is None:
            raise ValueError("EntropyBonus needs Objective.loss(..., entropy=[..., T])")
        return self.coef * tokens.entropy


class Sum(Regulariser):
    """The sum of several regularisers."""

    class Config(Regulariser.Config):
        terms: tuple[ConfigBase[Regulariser], ...] = ()

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.terms: tuple[Regulariser, ...] = tuple(term.build() for term in cfg.terms)
        self.needs_reference = any(term.needs_reference for term in self.terms)
        self.needs_exact_kl = any(term.needs_exact_kl for term in self.terms)

    @override
    def __call__(self, tokens: Tokens) -> jax.Array:
        total = jnp.zeros_like(tokens.new)
        for term in self.terms:
            total += term(tokens)
        return total
