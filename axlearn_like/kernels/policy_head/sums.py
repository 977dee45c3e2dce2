"""The rules and sums of a policy's head: what one pass over tiles of words adds up, and its gradient.

Shape letters: n tokens, d width, v words, w words of a tile, s devices that share the words.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh.errors import UserError

NEVER = -1e30  # the logit of a word that does not exist


class Statistics(NamedTuple):
    """Numbers of each token's distribution, float32 [n]."""

    logprob: Any  # log-probability of the target
    logsumexp: Any
    entropy: Any
    kl: Any = None  # KL to the reference's distribution; None: no reference


@dataclasses.dataclass(frozen=True)
class HeadRules:
    """How logits come from products of hidden states and columns: cap, then temperature."""

    temperature: float = 1.0  # logits are divided by it
    soft_cap: float | None = None  # logits become cap * tanh(logit / cap); None: they are not capped
    tile: int = 2048  # words whose logits exist at a time

    def __post_init__(self):
        if not self.temperature > 0:
            raise UserError(f"policy head: temperature is {self.temperature}; expected more than 0")
        if self.tile % 128 or self.tile < 1:
            raise UserError(f"policy head: tiles of {self.tile} words; expected a multiple of 128")

    def logits(self, products: jax.Array) -> jax.Array:
        """Return scaled logits of products in float32."""
        capped = products if self.soft_cap is None else self.soft_cap * jnp.tanh(products / self.soft_cap)
        return capped / self.temperature

    def slope(self, logits: jax.Array) -> jax.Array | float:
        """Return d logits / d products, from the scaled logits."""
        if self.soft_cap is None:
            return 1 / self.temperature
        return (1 - jnp.square(logits * (self.temperature / self.soft_cap))) / self.temperature


class Sums(NamedTuple):
    """Sums over some words, float32 [n, 1], relative to the peak."""

    peak: Any
    total: Any  # sum of exp(logit - peak)
    mean: Any  # sum of exp(logit - peak) * logit
    target: Any  # logit of the target, 0 where it is not among the words
    cross: Any  # sum of exp(logit - peak) * reference logit; zeros without a reference

    @staticmethod
    def empty(shape: tuple[int, ...]) -> "Sums":
        """Return the sums over no words."""
        zeros = jnp.zeros(shape, jnp.float32)
        return Sums(jnp.full(shape, NEVER, jnp.float32), zeros, zeros, zeros, zeros)

    def add(self, logits: jax.Array, is_target: jax.Array, reference: jax.Array | None = None) -> "Sums":
        """Return the sums with the words of one more tile, [n, w]; words that do not exist have NEVER."""
        peak = jnp.maximum(self.peak, jnp.max(logits, axis=-1, keepdims=True))
        shrunk, weights = jnp.exp(self.peak - peak), jnp.exp(logits - peak)

        def grown(before: jax.Array, values: jax.Array) -> jax.Array:
            return shrunk * before + jnp.sum(values, axis=-1, keepdims=True)

        cross = self.cross if reference is None else grown(self.cross, weights * reference)
        target = self.target + jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1, keepdims=True)
        return Sums(peak, grown(self.total, weights), grown(self.mean, weights * logits), target, cross)


def merge_shards(parts: Sums) -> Sums:
    """Return the sums over all words from those of each device, [s, n, 1], added in the order of the words."""
    peak = jnp.max(parts.peak, axis=0)
    shrunk = jnp.exp(parts.peak - peak)

    def added(values: jax.Array) -> jax.Array:
        return functools.reduce(operator.add, values)

    relative = [added(shrunk * values) for values in (parts.total, parts.mean, parts.cross)]
    return Sums(peak, relative[0], relative[1], added(parts.target), relative[2])


def statistics_of(sums: Sums, reference_logsumexp: jax.Array | None = None) -> Statistics:
    """Return the statistics of whole distributions, from their sums."""
    peak, total, mean, target, cross = (part[:, 0] for part in sums)
    logsumexp = peak + jnp.log(total)
    entropy = logsumexp - mean / total
    kl = jnp.zeros_like(entropy)
    if reference_logsumexp is not None:
        kl = (mean - cross) / total - logsumexp + reference_logsumexp[:, 0]
    return Statistics(target - logsumexp, logsumexp, entropy, kl)


def d_products(
    logits: jax.Array,
    is_target: jax.Array,
    columns: Any,
    rules: HeadRules,
    reference: jax.Array | None = None,
) -> jax.Array:
    """Return the gradient with respect to the products of a tile, float32 [n, w].

    Args:
        logits: scaled; NEVER for words that do not exist.
        is_target: bool [n, w].
        columns: [n, 1] each: the statistics, then their cotangents.
        reference: log-probabilities of the reference, [n, w].
    """
    _, logsumexp, entropy, kl, d_logprob, d_logsumexp, d_entropy, d_kl = columns
    logprobs = logits - logsumexp
    share = jnp.exp(logprobs)
    inner = d_logsumexp - d_logprob - d_entropy * (logprobs + entropy)
    if reference is not None:
        inner = inner + d_kl * (logprobs - reference - kl)
    d_logits = share * inner + jnp.where(is_target, d_logprob, 0.0)
    return jnp.where(logits > NEVER / 2, d_logits * rules.slope(logits), 0.0)
