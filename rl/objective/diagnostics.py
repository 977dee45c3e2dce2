"""Metrics of the loss: weighted means over its tokens, how they combine, and what follows from them.

Means are under `metric_weights`, which sum to one over the global batch, so they add up over micro-batches and devices.
A figure that is no mean (`ess`) is derived on the host, from means that are complete.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rl.objective.regulariser import kl_k3
from rl.objective.tokens import OldPolicy, Tokens, safe_exp


def diagnostics(tokens: Tokens, old_policy: OldPolicy) -> dict[str, jax.Array]:
    """Return metrics that every objective has; what each means is in docs/concepts/objective.md."""
    difference = jnp.abs(tokens.old - tokens.behaviour)
    if old_policy == "behaviour":
        # pi_old is mu by definition, so compare with pi: includes the movement of this update.
        difference = jnp.abs(tokens.new - tokens.behaviour)
    ratio, ratio_mu = safe_exp(tokens.new - tokens.old), safe_exp(tokens.new - tokens.behaviour)
    metrics = {
        "ratio_mean": weighted_mean(ratio, tokens),
        "ratio_max": jnp.max(jnp.where(tokens.mask, ratio, 0.0), initial=0.0),
        "ratio_mu_mean": weighted_mean(ratio_mu, tokens),
        "ratio_mu_square": weighted_mean(jnp.square(ratio_mu), tokens),
        "kl_old_new": weighted_mean(kl_k3(tokens.old, tokens.new), tokens),
        "kl_mu_pi": weighted_mean(kl_k3(tokens.behaviour, tokens.new), tokens),
        "drift_mean": weighted_mean(difference, tokens),
        "drift_max": jnp.max(difference, initial=0.0),
        "advantage_mean": weighted_mean(tokens.advantages, tokens),
        "advantage_abs_mean": weighted_mean(jnp.abs(tokens.advantages), tokens),
    }
    if tokens.kl is not None:
        metrics["kl_reference"] = weighted_mean(tokens.kl, tokens)
    elif tokens.reference is not None:
        metrics["kl_reference"] = weighted_mean(kl_k3(tokens.new, tokens.reference), tokens)
    if tokens.entropy is not None:
        metrics["entropy"] = weighted_mean(tokens.entropy, tokens)
    return metrics


def weighted_mean(value: jax.Array, tokens: Tokens) -> jax.Array:
    """Return a micro-batch's part of a mean over the tokens of the loss."""
    return jnp.sum(tokens.metric_weights * value)


def combine_metrics(first: Mapping[str, jax.Array], second: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The metrics of two disjoint parts of a batch, as one: max for "*_max", else the sum."""
    if first.keys() != second.keys():
        raise ValueError(f"metrics differ: {sorted(set(first) ^ set(second))}")
    return {
        name: jnp.maximum(value, second[name]) if name.endswith("_max") else value + second[name]
        for name, value in first.items()
    }


def derived_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics of a whole update that follow from its means; none if no token was learned from.

    `ess`: effective sample size of the weights w = pi / mu by token, (sum w)^2 / (n sum w^2), with the tokens weighted
    as in the loss: 1 where all ratios are equal, 1/n where one of n tokens has all the weight.
    """
    square = float(metrics.get("ratio_mu_square", 0.0))
    return {"ess": float(metrics["ratio_mu_mean"]) ** 2 / square} if square > 0 else {}
