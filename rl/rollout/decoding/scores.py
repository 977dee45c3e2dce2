"""Scores of tokens: their log-probabilities and ranks, and the likeliest tokens in their places.

They are parts of a decoding dispatch whose rows ask for them, or of a prefill, where each token is scored by the one
before it.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.training.losses import Chosen, chosen_tokens
from mesh import constrain

MOST = 20  # alternatives
BLOCK = 32  # tokens of a prefill whose logits exist at a time
# The model's own distribution, or the one that tokens are drawn from; named as by vLLM's --logprobs-mode.
ScoreMode = Literal["raw_logprobs", "processed_logprobs"]
MODES: tuple[ScoreMode, ...] = ("raw_logprobs", "processed_logprobs")


class Scores(NamedTuple):
    """Scores on the device, arrays [...] and [..., k]."""

    chosen: Chosen
    rank: Any  # int32 [...], 1 for the likeliest
    tokens: Any  # int32 [..., k], the likeliest first
    logits: Any  # float32 [..., k]


def token_scores(logits: jax.Array, tokens: jax.Array) -> Scores:
    """Return the scores of tokens [...] by logits [..., vocab]."""
    logits = logits.astype(jnp.float32)
    chosen = chosen_tokens(logits, tokens)
    values, ids = jax.lax.top_k(logits, min(MOST, logits.shape[-1]))
    rank = 1 + jnp.sum(logits > chosen.logit[..., None], axis=-1, dtype=jnp.int32)
    return Scores(chosen, rank, ids.astype(jnp.int32), values)


def empty_scores(*shape: int, vocab: int) -> Scores:
    """Return room for the scores of tokens of this shape."""
    ones, most = jnp.ones(shape, jnp.float32), (*shape, min(MOST, vocab))
    return Scores(Chosen(ones, ones, ones), jnp.ones(shape, jnp.int32), jnp.zeros(most, jnp.int32), jnp.zeros(most))


def drawn_scores(mode_r: jax.Array, raw_rv: jax.Array, logits_rv: jax.Array, tokens: jax.Array) -> Scores:
    """Return the scores of tokens drawn, of which none are computed where no row asks for any.

    Args:
        mode_r: int32, see `mode_number`.
        raw_rv: the model's logits.
        logits_rv: those of the distribution drawn from.
        tokens: int32 [r].
    """
    size, vocab = logits_rv.shape

    def scored() -> Scores:
        return token_scores(jnp.where(mode_r[:, None] == 1, raw_rv.astype(jnp.float32), logits_rv), tokens)

    return jax.lax.cond(jnp.any(mode_r > 0), scored, lambda: empty_scores(size, vocab=vocab))


def prompt_scores(model: Any, hidden_rcd: jax.Array, targets_rc: jax.Array) -> Scores:
    """Return the scores of the tokens behind each place of a prefill."""
    rows, chunk, width = hidden_rcd.shape
    blocks = max(1, chunk // BLOCK)

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(rows, blocks, chunk // blocks, *x.shape[2:]).swapaxes(0, 1)

    def of_block(block: tuple[jax.Array, jax.Array]) -> Scores:
        hidden, targets = block
        return token_scores(constrain(model.logits(hidden), None, None, None), targets)

    found = jax.lax.map(of_block, (cut(hidden_rcd), cut(targets_rc)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, chunk, *x.shape[3:]), found)


def mode_number(mode: ScoreMode | None) -> int:
    """Return the number of a mode in a batch; 0: no scores."""
    return 0 if mode is None else 1 + MODES.index(mode)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of n tokens: float32 [n] and [n, k], int32 [n] and [n, k]."""

    logprobs: np.ndarray
    ranks: np.ndarray
    tokens: np.ndarray  # the likeliest, in order
    top_logprobs: np.ndarray  # theirs

    @classmethod
    def of(cls, scores: Scores, *at: Any) -> "TokenScores":
        """Return the scores at an index of device arrays [..., k] that have been fetched."""
        chosen = Chosen(*(part[at] for part in scores.chosen))
        top = Chosen(scores.logits[at], chosen.peak[..., None], chosen.total[..., None])
        return cls(chosen.logprobs(), scores.rank[at], scores.tokens[at], top.logprobs())

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, some: slice) -> "TokenScores":
        return TokenScores(self.logprobs[some], self.ranks[some], self.tokens[some], self.top_logprobs[some])

    def __add__(self, more: "TokenScores") -> "TokenScores":
        return TokenScores(
            np.concatenate([self.logprobs, more.logprobs]),
            np.concatenate([self.ranks, more.ranks]),
            np.concatenate([self.tokens, more.tokens]),
            np.concatenate([self.top_logprobs, more.top_logprobs]),
        )
