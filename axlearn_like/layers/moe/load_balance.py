"""Losses that keep a router from sending all tokens to the same experts, and metrics of the balance.

All means are over every token of the batch (or microbatch) on all devices that is not padding: `live`, bool [batch,
length]; None: none is.
"""

from typing import Any

import jax
import jax.numpy as jnp


def expert_load(experts_btk: jax.Array, num_experts: int, live: Any = None) -> jax.Array:
    """Return the fraction of the choices that fell on each expert, float32 [num_experts]; sums to 1."""
    if live is None:
        return jnp.mean(_per_row(experts_btk, num_experts), axis=0)
    return _mean(jnp.mean(_one_hot(experts_btk, num_experts), axis=2), live, (0, 1))


def load_balance_loss(probs_bte: jax.Array, experts_btk: jax.Array, live: Any = None) -> jax.Array:
    """Return num_experts * sum_e load_e * mean probability of e: 1 when balanced (Switch, arXiv 2101.03961, eq. 4).

    The gradient goes through the probabilities; over the whole batch, as in GShard (arXiv 2006.16668, algorithm 1).
    """
    mean = _mean(probs_bte, live, (0, 1))
    return probs_bte.shape[-1] * jnp.sum(expert_load(experts_btk, probs_bte.shape[-1], live) * mean)


def sequence_balance_loss(probs_bte: jax.Array, experts_btk: jax.Array, live: Any = None) -> jax.Array:
    """Return the same for each row of the batch alone, averaged (DeepSeek-V3, arXiv 2412.19437, equations 17-20).

    Rows of padding alone do not count.
    """
    num_experts, mean = probs_bte.shape[-1], _mean(probs_bte, live, 1)
    if live is None:
        load, rows = _per_row(experts_btk, num_experts), None
    else:
        load, rows = _mean(jnp.mean(_one_hot(experts_btk, num_experts), axis=2), live, 1), jnp.any(live, axis=1)
    return _mean(num_experts * jnp.sum(load * mean, axis=-1), rows, 0)


def z_loss(logits_bte: jax.Array, live: Any = None) -> jax.Array:
    """Return the mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, equation 5)."""
    return _mean(jax.nn.logsumexp(logits_bte, axis=-1) ** 2, live, (0, 1))


def balance_bias(bias_e: jax.Array, experts_btk: jax.Array, live: Any = None) -> jax.Array:
    """Return 0, with a gradient for the bias: each expert's load over the mean load, less 1; 0 if all is padding.

    It is summed over microbatches, devices and layers as gradients are; `axlearn_like.learner.expert_bias` applies it.
    """
    excess = bias_e.shape[-1] * expert_load(experts_btk, bias_e.shape[-1], live) - 1.0
    if live is not None:
        excess = jnp.where(jnp.any(live), excess, 0.0)
    return jnp.sum(jax.lax.stop_gradient(excess) * (bias_e - jax.lax.stop_gradient(bias_e)))


def router_metrics(probs_bte: jax.Array, experts_btk: jax.Array, live: Any = None) -> dict[str, jax.Array]:
    """Return metrics of the balance.

    Returns:
        `expert_load_max`, the busiest expert's load over the mean load, and `router_entropy`, nats, a mean over tokens.
    """
    probs = jax.lax.stop_gradient(probs_bte)
    terms = jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), 0.0)
    busiest = probs.shape[-1] * jnp.max(expert_load(experts_btk, probs.shape[-1], live))
    return {"expert_load_max": busiest, "router_entropy": -_mean(jnp.sum(terms, axis=-1), live, (0, 1))}


def _mean(values: jax.Array, live: jax.Array | None, axes: int | tuple[int, ...]) -> jax.Array:
    """Return the mean over the live ones; 0 where there are none. None: all are."""
    if live is None:
        return jnp.mean(values, axis=axes)
    live = live if live.ndim == values.ndim else live[..., None]
    total = jnp.sum(jnp.where(live, values, 0.0), axis=axes)
    return total / jnp.maximum(jnp.sum(live, axis=axes, dtype=jnp.float32), 1.0)


def _per_row(experts_btk: jax.Array, num_experts: int) -> jax.Array:
    """Return float32 [batch, num_experts], fractions of a row's choices."""
    return jnp.mean(_one_hot(experts_btk, num_experts), axis=(1, 2))


def _one_hot(experts_btk: jax.Array, num_experts: int) -> jax.Array:
    """Return float32 [batch, length, top_k, num_experts], 1 at the chosen ones."""
    return (experts_btk[..., None] == jnp.arange(num_experts, dtype=experts_btk.dtype)).astype(jnp.float32)
