"""Penalties on tokens that a sequence has: factors on their logits, and amounts taken from them.

Counts are int32 [r, vocab]: twice the number of times that the completion has a token, and 1 more if the prompt has it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_IN_PROMPT, _ONCE = 1, 2


def count_tokens(counts_v: np.ndarray, tokens: Sequence[int], prompt: int) -> None:
    """Write the counts of a sequence whose first `prompt` tokens are its prompt."""
    counts_v[:] = _ONCE * np.bincount(tokens[prompt:], minlength=len(counts_v)) if len(tokens) > prompt else 0
    counts_v[tokens[:prompt]] += _IN_PROMPT  # once, however often it is there


def with_drawn(counts_rv: jax.Array, rows: jax.Array, tokens: jax.Array, kept: jax.Array) -> jax.Array:
    """Return the counts with more tokens of the completions, where `kept`."""
    return counts_rv.at[rows, tokens].add(_ONCE * kept)


def by_place(counts_rv: jax.Array | None, drafts: jax.Array) -> jax.Array | None:
    """Return counts [r * c, vocab] before each place: tokens so far, and the drafted ones [r, c - 1] before it."""
    if counts_rv is None:
        return None
    words, counts = jnp.arange(counts_rv.shape[-1]), [counts_rv]
    for place in range(drafts.shape[1]):
        counts.append(counts[-1] + _ONCE * (drafts[:, place, None] == words))
    return jnp.stack(counts, axis=1).reshape(-1, counts_rv.shape[-1])


def penalise(
    logits_rv: jax.Array, counts_rv: jax.Array, repetition_r1: jax.Array | np.ndarray, amounts_r2: jax.Array | None
) -> jax.Array:
    """Return penalised logits, in vLLM's order.

    Args:
        logits_rv: float32.
        counts_rv: tokens of prompt and completion.
        repetition_r1: factor of tokens of either (Keskar et al. 2019, arXiv 1909.05858, section 4.1, for logits of
            either sign).
        amounts_r2: for tokens of the completion: taken once (presence), and each time (frequency); None: there are
            none.
    """
    factor = jnp.where(logits_rv > 0, logits_rv / repetition_r1, logits_rv * repetition_r1)
    logits = jnp.where(counts_rv > 0, factor, logits_rv)
    if amounts_r2 is None:
        return logits
    times = counts_rv // _ONCE
    taken = amounts_r2[:, :1] * (times > 0) + amounts_r2[:, 1:] * times
    return jnp.where(times > 0, logits - taken, logits)
