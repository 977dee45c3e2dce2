"""Log-probabilities of rollouts by a plain forward pass over whole sequences, in the order in which the engine sums.

In float32 on a CPU they equal the engine's own to the bit, under the same weights (on TPUs by exact numerics); `bench`
and the trainer's metrics compare them. The update itself computes a prompt once for all its samples, which is faster
and sums in another order.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.kernels.exact.scope import use_numerics
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.training.heads.chunked_head import map_chunks, merge_length
from axlearn_like.training.losses import Chosen, chosen_tokens
from mesh import constrain
from rl.rollout.decoding.drawing import among
from rl.training.columns import to_model

_MULTIPLE = 16  # rows have a multiple of so many tokens


def row_length(max_prompt_tokens: int, max_new_tokens: int) -> int:
    """Tokens in a row that holds every prompt with its completion, the last token being a target only."""
    return -(-(max_prompt_tokens + max_new_tokens - 1) // _MULTIPLE) * _MULTIPLE


def padded(count: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-count // multiple) * multiple


def fill_rows(sequences: Sequence[tuple[np.ndarray, np.ndarray]], rows: int, length: int) -> dict[str, np.ndarray]:
    """Return tokens and targets of prompts with their completions, a row each, and of empty rows after them."""
    whole = np.zeros((rows, length + 1), np.int32)
    for index, (prompt, completion) in enumerate(sequences):
        whole[index, : len(prompt)] = prompt
        whole[index, len(prompt) : len(prompt) + len(completion)] = completion
    return {"tokens": whole[:, :-1], "targets": whole[:, 1:]}


def score_rows(
    model: Any,
    tokens: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    *,
    routing: jax.Array | None = None,
    candidate_tokens: jax.Array | None = None,
    chunks: int = 1,
    tile: int | None = None,
) -> Chosen:
    """Log pi of each target, in parts [rows, length]; pure, to be traced.

    Args:
        model: a decoder.
        tokens: int32 [rows, length].
        targets: int32 [rows, length].
        temperature: an array [1], since XLA divides by an array but multiplies by a constant's reciprocal.
        routing: int16 [rows, length, layers with experts, top_k], experts to be used again (see columns.py).
        candidate_tokens: int32 [rows, length, most], tokens that each target was drawn from (see columns.py).
        chunks: parts of the length whose logits exist at a time; as many as divide it.
        tile: words of which a device is to hold logits at a time: there are as many parts more, as sums over words have
            to be in the engine's order.
    """
    with use_numerics(model.numerics):
        columns = {"routing": routing, "candidate_tokens": candidate_tokens}
        return _score_rows(model, tokens, targets, temperature, **columns, chunks=chunks, tile=tile)


def _score_rows(
    model: Any,
    tokens: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    *,
    routing: jax.Array | None,
    candidate_tokens: jax.Array | None,
    chunks: int,
    tile: int | None,
) -> Chosen:
    positions = constrain(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), "batch", None)
    experts = None if routing is None else to_model(model.routing_layout, routing)
    hidden = model.hidden(tokens, RowContext(positions), routing=experts).x
    if tile is not None:
        chunks = max(chunks, 1 << (-(-model.vocab_size // tile) - 1).bit_length())
    chunks = math.gcd(chunks, tokens.shape[1])

    def one(x: jax.Array, targets: jax.Array, *kept: jax.Array) -> Chosen:
        logits = model.logits(x) / temperature
        return chosen_tokens(no_fuse(among(logits, *kept) if kept else logits), targets)

    kept = () if candidate_tokens is None else (candidate_tokens,)
    if chunks == 1:
        return one(hidden, targets, *kept)
    return jax.tree.map(merge_length, map_chunks(one, chunks, hidden, targets, *kept))
