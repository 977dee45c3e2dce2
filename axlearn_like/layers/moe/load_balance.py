"""Losses that keep a router from sending all tokens to the same experts, and metrics of the balance.

All means are over every token of the batch (or microbatch) on all devices, padding included.
"""

import jax
import jax.numpy as jnp


def expert_load(experts_btk: jax.Array, num_experts: int) -> jax.Array:
    """Return the fraction of the choices that fell on each expert, float32 [num_experts]; sums to 1."""
    return jnp.mean(_per_row(experts_btk, num_experts), axis=0)


def load_balance_loss(probs_bte: jax.Array, experts_btk: jax.Array) -> jax.Array:
    """Return num_experts * sum_e load_e * mean probability of e: 1 when balanced (Switch, arXiv 2101.03961, eq. 4).

    The gradient goes through the probabilities; over the whole batch, as in GShard (arXiv 2006.16668, algorithm 1).
    """
    mean = jnp.mean(probs_bte, axis=(0, 1))
    return probs_bte.shape[-1] * jnp.sum(expert_load(experts_btk, probs_bte.shape[-1]) * mean)


def sequence_balance_loss(probs_bte: jax.Array, experts_btk: jax.Array) -> jax.Array:
    """Return the same for each row of the batch alone, averaged (DeepSeek-V3, arXiv 2412.19437, equations 17-20)."""
    num_experts = probs_bte.shape[-1]
    mean = jnp.mean(probs_bte, axis=1)
    return jnp.mean(num_experts * jnp.sum(_per_row(experts_btk, num_experts) * mean, axis=-1))


def z_loss(logits_bte: jax.Array) -> jax.Array:
    """Return the mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, equation 5)."""
    return jnp.mean(jax.nn.logsumexp(logits_bte, axis=-1) ** 2)


def balance_bias(bias_e: jax.Array, experts_btk: jax.Array) -> jax.Array:
    """Return 0, with a gradient for the bias: each expert's load over the mean load, less 1.

    It is summed over microbatches, devices and layers as gradients are; `axlearn_like.learner.expert_bias` applies it.
    """
    excess = bias_e.shape[-1] * expert_load(experts_btk, bias_e.shape[-1]) - 1.0
    return jnp.sum(jax.lax.stop_gradient(excess) * (bias_e - jax.lax.stop_gradient(bias_e)))


def router_metrics(probs_bte: jax.Array, experts_btk: jax.Array) -> dict[str, jax.Array]:
    """Return metrics of the balance.

    Returns:
        `expert_load_max`, the busiest expert's load over the mean load, and `router_entropy`, nats, a mean over tokens.
    """
    probs = jax.lax.stop_gradient(probs_bte)
    terms = jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), 0.0)
    busiest = probs.shape[-1] * jnp.max(expert_load(experts_btk, probs.shape[-1]))
    return {"expert_load_max": busiest, "router_entropy": -jnp.mean(jnp.sum(terms, axis=-1))}


def _per_row(experts_btk: jax.Array, num_experts: int) -> jax.Array:
    """Return float32 [batch, num_experts], fractions of a row's choices."""
    chosen = experts_btk[..., None] == jnp.arange(num_experts, dtype=experts_btk.dtype)
    return jnp.mean(chosen.astype(jnp.float32), axis=(1, 2))
