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
from axlearn_like.training.alignment.sequences import ScoredArray
from axlearn_like.training.losses import Batch, Loss, Metrics
from axlearn_like.training.step import State, Step
from mesh.rules import axis_sizes
from mesh.sharding import merge_rows, split_rows

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
