"""Scoring before a step: what other policies make of a batch, added to it as arrays.

Reference and policy are scored once for a batch, with the parameters from before the update. So no gradient goes
through the scores, they do not depend on microbatches, and the train step holds one policy.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from axlearn_like.layers.base import Params, bind
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.alignment.sequences import target_logprobs
from axlearn_like.training.losses import Batch, Loss, Metrics
from axlearn_like.training.step import State, Step
from mesh.rules import axis_sizes
from mesh.sharding import merge_rows, shard_like, split_rows

_MISMATCHED = "other_"  # in the names of arrays that only scoring needs


class Scoring:
    """A loss with the policy that it compares with.

    Attributes:
        loss: of a model and a scored batch.
        reference: whose parameters `scored` uses.
        score: jitted `({"policy", "reference"}, batch) -> batch` with the scores.
    """

    def __init__(self, loss: Any, reference: Reference, graphdef: nnx.GraphDef[Any], microbatches: int = 1):
        """Take a loss whose config has `scores`; a batch is scored in so many parts, one after another."""
        self.loss: Loss = loss
        self.reference = reference
        score = partial(scored_batch, graphdef, chunks=loss.cfg.chunks, microbatches=microbatches)
        self.score: Any = jax.jit(partial(score, dict(loss.cfg.scores)))

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
    graphdef: nnx.GraphDef[Any],
    scores: Mapping[str, bool],
    policies: Mapping[str, Params],
    batch: Batch,
    *,
    chunks: int,
    microbatches: int,
) -> dict[str, jax.Array]:
    """Return the batch with its scores, and without what only they need; pure.

    Args:
        graphdef: of both policies.
        scores: any of `reference`, log-probabilities of the targets under the reference [batch, length], and
            `mismatched`, the mean log-ratio of policy to reference of the sequences `other_*`.
        policies: parameters of `policy` and `reference`.
        batch: on the mesh.
        chunks: of the head.
        microbatches: parts of the batch.
    """
    policy, reference = (bind(graphdef, policies[name]) for name in ("policy", "reference"))

    def one(part: Batch) -> dict[str, jax.Array]:
        found = {"reference": target_logprobs(reference, part, chunks).logprobs}
        if "mismatched" in scores:
            ours, theirs = (target_logprobs(p, part, chunks, _MISMATCHED).logprobs for p in (policy, reference))
            live, weights = (shard_like(part[name], ours) for name in (f"{_MISMATCHED}sides", "weights"))
            ratios = jnp.where(live != 0, ours - theirs, 0.0)
            found["mismatched"] = jnp.sum(ratios) * jnp.max(weights)  # which is 1 / (examples of the whole batch)
        return found

    if microbatches == 1:
        found = one(batch)
    else:
        parts = jax.lax.map(one, {name: split_rows(x, microbatches) for name, x in batch.items()})
        found = {name: merge_rows(x) if scores[name] else jnp.sum(x) for name, x in parts.items()}
    return {name: x for name, x in batch.items() if not name.startswith(_MISMATCHED)} | found


def describe_scored(batch: Mapping[str, Any], scores: Mapping[str, bool]) -> dict[str, Any]:
    """Return the described arrays of a batch after scoring."""
    if not scores:
        return dict(batch)
    tokens = batch["tokens"]
    scalar = tokens.sharding
    if axis_sizes("batch"):
        scalar = NamedSharding(tokens.sharding.mesh, jax.P())
    added = {
        name: jax.ShapeDtypeStruct(
            tokens.shape if each else (), jnp.float32, sharding=tokens.sharding if each else scalar
        )
        for name, each in scores.items()
    }
    return {name: x for name, x in batch.items() if not name.startswith(_MISMATCHED)} | added
