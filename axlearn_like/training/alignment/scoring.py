"""Scoring before a step: what other policies make of a batch, added to it as arrays.

Reference and policy are scored once for a batch, with the parameters from before the update. So no gradient goes
through the scores, they do not depend on microbatches, and the train step holds one policy.

Log-probabilities are those of packed tokens, with their sums over the sequences of a row.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.contexts.packed import PackedContext, require_complete_rows
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.heads.chunked_head import map_chunks, merge_length, per_device_head
from axlearn_like.training.losses import Batch, Loss, Metrics, token_logprobs
from axlearn_like.training.step import State, Step
from mesh import constrain
from mesh.rules import axis_sizes
from mesh.sharding import merge_rows, shard_like, split_rows


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


_MISMATCHED = "other_"  # prefix of arrays that only scoring needs


class Scoring:
    """A loss with the policy that it compares with.

    Attributes:
        loss: loss of a model and a scored batch.
        reference: reference whose parameters `scored` uses.
        score: jitted `({"policy", "reference"}, batch) -> batch` with the scores.
    """

    def __init__(self, loss: Any, reference: Reference, graphdef: nnx.GraphDef[Any], microbatches: int = 1):
        """Take a loss whose config has `scores`; a batch is scored in so many parts, one after another."""
        self.loss: Loss = loss
        self.reference = reference
        graphdefs = {"policy": graphdef, "reference": reference.graphdef or graphdef}
        self.score: Any = jax.jit(partial(scored_batch, loss, graphdefs, microbatches=microbatches))

    def __call__(self, model: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return loss and metrics of a scored batch."""
        return self.loss(model, batch)

    def scored(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Return the batch with its scores, given the policy's parameters."""
        return self.score({"policy": params, "reference": self.reference.params(params)}, batch)


class ScoredStep:
    """`step(state, batch)` of a train step whose batches are scored first.

    Attributes:
        step: the train step.
        scoring: its `score` is a program of its own.
    """

    def __init__(self, step: Step, scoring: Scoring):
        self.step, self.scoring = step, scoring

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Return the state after the update, which is donated, and metrics."""
        return self.step(state, self.scoring.scored(state["params"], batch))


def scored_batch(
    loss: Any,
    graphdefs: Mapping[str, nnx.GraphDef[Any]],
    policies: Mapping[str, Params],
    batch: Batch,
    *,
    microbatches: int,
) -> dict[str, jax.Array]:
    """Return the batch with its scores, and without what only they need; pure.

    Args:
        loss: its `score(policy, reference, batch)` returns the arrays of its config's `scores`.
        batch: on the mesh.
        microbatches: parts of the batch.
    """
    models = [bind(graphdefs[name], policies[name]) for name in ("policy", "reference")]
    if microbatches == 1:
        found = loss.score(*models, batch)
    else:
        parts = {name: split_rows(x, microbatches) for name, x in batch.items()}
        found = jax.lax.map(lambda part: loss.score(*models, part), parts)
        sums = {name for name, score in loss.cfg.scores.items() if score.axes is None}
        found = {name: jnp.sum(x) if name in sums else merge_rows(x) for name, x in found.items()}
    return {name: x for name, x in batch.items() if not name.startswith(_MISMATCHED)} | found


def describe_scored(batch: Mapping[str, Any], scores: Mapping[str, ScoredArray]) -> dict[str, Any]:
    """Return the described arrays of a batch after scoring."""
    if not scores:
        return dict(batch)
    tokens = batch["tokens"]

    def described(score: ScoredArray) -> jax.ShapeDtypeStruct:
        shape, sharding = (), tokens.sharding
        if score.axes is not None:
            shape = (*tokens.shape, *score.axes)
        elif axis_sizes("batch"):
            sharding = NamedSharding(tokens.sharding.mesh, jax.P())
        return jax.ShapeDtypeStruct(shape, jnp.dtype(score.dtype), sharding=sharding)

    kept = {name: x for name, x in batch.items() if not name.startswith(_MISMATCHED)}
    return kept | {name: described(score) for name, score in scores.items()}
