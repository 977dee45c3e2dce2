"""Log-probabilities of packed tokens, and their sums over the sequences of a row."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.layers.aux import Aux
from axlearn_like.layers.contexts.packed import PackedContext, require_complete_rows
from axlearn_like.training.heads.chunked_head import map_chunks, merge_length, per_device_head
from axlearn_like.training.losses import Batch, token_logprobs
from mesh import constrain
from mesh.sharding import shard_like


class ScoredArray(NamedTuple):
    """An array that scoring adds to a batch: its dtype, and its axes after [batch, length]; None: it is a sum, []."""

    dtype: str = "float32"
    axes: tuple[int, ...] | None = ()


class TargetLogprobs(NamedTuple):
    """log pi of each target, float32 [batch, length], and the layers' auxiliary outputs."""

    logprobs: jax.Array
    aux: Aux


def packed_hidden(model: Any, batch: Batch, prefix: str = "") -> Any:
    """Return what a model's layers make of a packed batch (UserError: the mesh shards the length of rows)."""
    context = PackedContext(batch["positions"], batch["segment_ids"])
    require_complete_rows(context)
    hidden = model.hidden(batch[f"{prefix}tokens"], context)
    # Whole rows, where stages of a pipeline have shared them.
    return hidden._replace(x=constrain(hidden.x, "batch", "length", None))


def target_logprobs(model: Any, batch: Batch, chunks: int = 1, prefix: str = "") -> TargetLogprobs:
    """Return the log-probability of every target of a packed batch; logits of one chunk exist at a time.

    Args:
        batch: `tokens`, `targets` (both names after `prefix`), `positions` and `segment_ids`, int32 [batch, length].
        chunks: parts of the length, which they divide.
        prefix: prefix of the names of other sequences that are laid out like those of the batch.

    Raises:
        UserError: the mesh shards the length of rows, or the decoder's head makes no logits.
    """
    hidden = packed_hidden(model, batch, prefix)
    x, targets = hidden.x, shard_like(batch[f"{prefix}targets"], hidden.x)

    def of_tokens(output: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        return token_logprobs(output.logits(x), targets)

    def in_parts(output: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        return merge_length(map_chunks(partial(of_tokens, output), chunks, x, targets))

    if chunks == 1:
        return TargetLogprobs(of_tokens(model.output, x, targets), hidden.aux)
    return TargetLogprobs(per_device_head(model.output, in_parts, x, targets), hidden.aux)


def running_sums(values: jax.Array, ends: jax.Array) -> jax.Array:
    """Return for each token the sum over its example up to it, of values [batch, length, ...].

    Args:
        values: float32.
        ends: bool [batch, length], True at the last token of an example; the next token begins another one.

    Sums of examples are made apart, by a scan: a difference of running sums over the row would lose the digits by
    which long rows outweigh short completions.
    """
    begins = jnp.concatenate([jnp.ones_like(ends[:, :1]), ends[:, :-1]], axis=1)
    begins = begins.reshape(*begins.shape, *[1] * (values.ndim - 2))

    def add(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return left[0] | right[0], right[1] + jnp.where(right[0], 0.0, left[1])

    return jax.lax.associative_scan(add, (begins, values), axis=1)[1]
