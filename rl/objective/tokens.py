"""The per-token view of a batch that every device-side component of the objective reads."""

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

OldPolicy = Literal["recompute", "behaviour", "current"]

# exp(+-20) is finite in float32 and far outside any range a clip or a cap lets through.
MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """Float32 arrays of one shape [..., T]; a row is one rollout; zero where `mask` is false.

    new: log pi, the parameters being differentiated.
    old: log pi_old, the parameters at the start of the update (constant).
    behaviour: log mu, the distribution that drew the tokens (constant).
    advantages, weights, metric_weights: constants from the host, see `Objective.prepare`.
    mask: bool, tokens that count: sampled by the policy and of non-zero weight.
    reference: log pi_ref (constant), or None.
    entropy: entropy of pi at each position (differentiable), or None.
    kl: KL(pi || ref) of the whole distributions at each position (differentiable), or None.
    demonstrations: bool, tokens that were given and not drawn: mu is taken to be pi_old there; or None.
    """

    new: jax.Array
    old: jax.Array
    behaviour: jax.Array
    advantages: jax.Array
    weights: jax.Array
    metric_weights: jax.Array
    mask: jax.Array
    reference: jax.Array | None
    entropy: jax.Array | None
    demonstrations: jax.Array | None = None
    kl: jax.Array | None = None


def safe_exp(x: jax.Array) -> jax.Array:
    """exp(x) with x clamped to +-20, so that one stray token cannot make an inf."""
    return jnp.exp(jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the last axis of the entries under `mask`, [..., 1]; 0 for an empty row."""
    count = jnp.sum(mask, axis=-1, keepdims=True)
    return jnp.sum(jnp.where(mask, x, 0.0), axis=-1, keepdims=True) / jnp.maximum(count, 1)


def gather_tokens(
    logprobs: jax.Array,
    batch: Mapping[str, jax.Array],
    *,
    old_policy: OldPolicy,
    entropy: jax.Array | None = None,
    kl: jax.Array | None = None,
) -> Tokens:
    """Cast to float32, detach the constants and blank everything outside the mask.

    Blanking is by selection, not multiplication, so NaN or inf at a padded position reaches
    neither the loss nor the gradient.

    Raises:
        KeyError: the batch lacks an array that `old_policy` needs.
        ValueError: an array is not [..., T] (or, for advantages, [...]).
    """
    shape = logprobs.shape
    constant = functools.partial(_constant, batch, shape, old_policy)
    raw_weights = constant("weights").astype(jnp.float32)
    mask = constant("action_mask").astype(bool) & (raw_weights != 0)

    def blank(value: jax.Array) -> jax.Array:
        return jnp.where(mask, value.astype(jnp.float32), 0.0)

    new = blank(logprobs)
    behaviour = blank(constant("logprobs_behaviour"))
    given = constant("demonstrations").astype(bool) & mask if "demonstrations" in batch else None
    if old_policy == "behaviour":
        old = behaviour if given is None else jnp.where(given, jax.lax.stop_gradient(new), behaviour)
    elif old_policy == "current":
        old = jax.lax.stop_gradient(new)
    else:
        old = blank(constant("logprobs_old"))
    if given is not None:
        behaviour = jnp.where(given, old, behaviour)
    for name, one in (("entropy", entropy), ("kl", kl)):
        if one is not None and one.shape != shape:
            raise ValueError(f"{name} has shape {one.shape}, expected {shape}")
    metric_name = "metric_weights" if "metric_weights" in batch else "weights"
    return Tokens(
        new=new,
        old=old,
        behaviour=behaviour,
        advantages=blank(constant("advantages")),
        weights=blank(raw_weights),
        metric_weights=blank(constant(metric_name)),
        mask=mask,
        reference=blank(constant("logprobs_reference")) if "logprobs_reference" in batch else None,
        entropy=None if entropy is None else blank(entropy),
        demonstrations=given,
        kl=None if kl is None else blank(kl),
    )


def _constant(batch: Mapping[str, jax.Array], shape: tuple[int, ...], old_policy: OldPolicy, name: str) -> jax.Array:
    """Return an array of a batch, [..., T], detached; advantages by rollout are repeated for its tokens."""
    if name not in batch:
        raise KeyError(
            f"batch[{name!r}] is missing; the objective (old_policy={old_policy!r}) needs it. "
            f"The batch has: {', '.join(sorted(batch))}"
        )
    value = batch[name]
    if name == "advantages" and value.ndim == len(shape) - 1:
        value = value[..., None]  # one advantage per rollout
        if value.shape[:-1] == shape[:-1]:
            value = jnp.broadcast_to(value, shape)
    if value.shape != shape:
        expected = f"{shape}" + (f" or {shape[:-1]}" if name == "advantages" else "")
        raise ValueError(f"batch[{name!r}] has shape {batch[name].shape}, expected {expected}")
    return jax.lax.stop_gradient(value)
