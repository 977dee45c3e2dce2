"""Drawing tokens: the distribution, its log-probabilities, and keys that depend on nothing but the request.

The key of a draw is a function of (seed, prompt id, sample id, position in the completion), not of batch, row or
worker, so a lost rollout can be generated again, anywhere, with the same tokens. For the same to hold of the
distribution, sequences of different parameters share one compiled step (`SamplingMetadata` has a row a sequence), and
each row has the bits it would have alone.
"""

import jax
import jax.numpy as jnp

from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.training.losses import Chosen, chosen_tokens
from rl.rollout.decoding.penalties import penalise
from rl.rollout.sampling import NEVER, SamplingMetadata


def distribution(
    logits_rv: jax.Array,
    metadata: SamplingMetadata,
    *,
    counts_rv: jax.Array | None = None,
    bias_rv: jax.Array | None = None,
    penalties_r2: jax.Array | None = None,
    plain: bool,
) -> jax.Array:
    """Return the logits of the distribution drawn from, float32 [r, vocab]; tokens that are never drawn have NEVER.

    Rows do not affect each other. A row whose own parameters are plain has the same bits on both paths.

    Args:
        logits_rv: the model's, any float dtype.
        metadata: arrays, not constants, where it matters: XLA divides by an array, but multiplies by a constant's
            reciprocal, which is another number.
        counts_rv: int32, tokens of the prompt and of the completion so far (see `count_tokens`); None if no row has a
            penalty.
        bias_rv: float32, see `pack_bias`; None if no row has any.
        penalties_r2: float32, penalties of presence and frequency; None if no row has any.
        plain: static; every row is `plain`, so that dividing by the temperature is all there is to do.
    """
    logits = logits_rv.astype(jnp.float32)
    if plain:
        return logits / metadata.temperature[..., None]
    # Columns [r, 1] that are sharded as the logits are.
    metadata = jax.tree.map(lambda column: column[..., None] + jnp.zeros_like(logits[..., :1], column.dtype), metadata)
    if bias_rv is not None:
        logits = logits + jnp.where(bias_rv == 0, -0.0, bias_rv)  # x + 0.0 is not x where x is -0.0
    if counts_rv is not None:
        logits = penalise(logits, counts_rv, metadata.repetition_penalty, penalties_r2)
    greedy = metadata.temperature == 0
    best = jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1, keepdims=True)  # the first of equals
    scaled = logits / jnp.where(greedy, 1.0, metadata.temperature)
    dropped = (greedy & ~best) | (~greedy & (scaled < _smallest_kept(scaled, metadata)))
    if bias_rv is not None:
        dropped |= bias_rv <= NEVER
    certain = greedy & ~jnp.isnan(scaled)  # a broken model's tokens must not be scored as certain
    return jnp.where(dropped, NEVER, jnp.where(certain, 0.0, scaled))


def _smallest_kept(logits_rv: jax.Array, metadata: SamplingMetadata) -> jax.Array:
    """Return the smallest logit that top_k, top_p and min_p leave in each row, [r, 1]; metadata is [r, 1] here.

    min_p compares with the likeliest token, which is never dropped, so it needs neither the order of the tokens nor
    the result of the other two. Those need one sort, done only if some row asks for it.
    """

    def by_rank() -> jax.Array:
        ordered = -jnp.sort(-logits_rv, axis=-1)
        rank = jnp.arange(ordered.shape[-1])
        kth = jnp.min(ordered, axis=-1, keepdims=True, where=rank < metadata.top_k, initial=jnp.inf)
        mass = jax.nn.softmax(jnp.where(ordered < kth, NEVER, ordered), axis=-1)
        mass_before = jnp.cumsum(mass, axis=-1) - mass
        # In float32 a tiny top_p is 0, and a sum of masses may reach 1 before the last token.
        nucleus = (mass_before < metadata.top_p) | (rank == 0) | (metadata.top_p == 1)
        last = jnp.min(ordered, axis=-1, keepdims=True, where=nucleus, initial=jnp.inf)
        return jnp.maximum(kth, last)

    ranked = jnp.any((metadata.top_k < logits_rv.shape[-1]) | (metadata.top_p < 1))
    smallest = jax.lax.cond(ranked, by_rank, lambda: jnp.min(logits_rv, axis=-1, keepdims=True))
    return jnp.maximum(smallest, jnp.max(logits_rv, axis=-1, keepdims=True) + jnp.log(metadata.min_p))


def keep_most(logits_rv: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Return a distribution's logits with at most `most` tokens left, and these tokens, int32 [r, most].

    Where fewer are left, -1 follows. `logits_rv`: the result of `distribution`.
    """
    values, tokens = jax.lax.top_k(logits_rv, min(most, logits_rv.shape[-1]))
    left = (values > NEVER / 2) | jnp.isnan(values)  # a broken model's tokens must not be scored as certain
    kept = jnp.where(left, tokens, -1).astype(jnp.int32)
    kept = jnp.pad(kept, ((0, 0), (0, most - kept.shape[-1])), constant_values=-1)
    return among(logits_rv, kept), kept


def among(logits: jax.Array, kept: jax.Array) -> jax.Array:
    """Return the logits [..., v] of the tokens `kept` [..., k], and NEVER for all others; -1 is no token."""
    tokens = jnp.arange(logits.shape[-1], dtype=kept.dtype)
    return jnp.where(jnp.any(kept[..., None] == tokens, axis=-2), logits, NEVER)


def draw(keys_r: jax.Array, logits_rv: jax.Array) -> tuple[jax.Array, Chosen]:
    """Draw a token of each row's distribution, int32 [r]; returns it and its log-probability, in parts.

    Args:
        keys_r: a PRNG key for each row. [r] may be several axes.
        logits_rv: the result of `distribution`.
    """
    # The rest is compiled alike for all distributions. Fused with the computation of the logits, the log-probability
    # would be rounded in other places, and differ in its last bit between the two paths above.
    logits_rv = no_fuse(logits_rv)
    noise = jax.random.gumbel
    for _ in range(keys_r.ndim):
        noise = jax.vmap(noise, in_axes=(0, None))
    # Like `jax.random.categorical`, but not fused: XLA's CPU code takes the logarithms of the noise one by one where it
    # fuses them into the search for the largest, four times as slow.
    scores = no_fuse(noise(keys_r, logits_rv.shape[-1:]) + logits_rv)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    tokens = jnp.min(jnp.where(scores == largest, index, index[-1]), axis=-1)
    return tokens, chosen_tokens(logits_rv, tokens)


def row_keys(identity: jax.Array) -> jax.Array:
    """Return PRNG keys [r] of samples; folding in the position in the completion gives the key of a draw.

    Args:
        identity: uint32 [r, 4]: seed, high and low half of the prompt's id, sample id.
    """

    def of_row(row: jax.Array) -> jax.Array:
        key = jax.random.key(row[0])
        for part in (row[1], row[2], row[3]):
            key = jax.random.fold_in(key, part)
        return key

    return jax.vmap(of_row)(identity)
