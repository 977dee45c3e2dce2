"""Losses of scoring heads: classes, regression, and preferences, in the additive form that accumulation needs.

The batches are those of `LabelledInput`. Its weights are on tokens with labels, so one loss serves sequences (one
label, on the last token) and tokens or steps (many labels).
"""

import abc
from typing import Any, override

import jax
import jax.numpy as jnp

from axlearn_like.layers.contexts.packed import PackedContext, require_complete_rows
from axlearn_like.training.losses import Batch, Metrics, PackedLoss, token_hits, token_logprobs, with_aux
from mesh.errors import UserError
from mesh.rules import partition
from mesh.sharding import shard_like


class HeadLoss(PackedLoss, abc.ABC):
    """Base of losses of a decoder's scores: subclasses compute `of_scores`."""

    class Config(PackedLoss.Config):
        @property
        @override
        def contents(self) -> str:
            return "labels"

    def __call__(self, model: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return loss and metrics of a decoder on a packed batch of `LabelledInput`, additive over slices.

        Raises:
            UserError: the decoder's head makes no scores, or the mesh shards the length of rows.
        """
        context = PackedContext(batch["positions"], batch["segment_ids"])
        require_complete_rows(context)
        hidden = model.hidden(batch["tokens"], context)
        scores = model.scores(hidden.x, context)
        labels, weights = (shard_like(batch[name], hidden.x) for name in ("targets", "weights"))
        loss, metrics = self.of_scores(scores, labels, weights, batch["positions"])
        tokens = jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32)
        return with_aux(loss, {"loss": loss, **metrics, "tokens": tokens}, hidden.aux, jnp.sum(batch["weights"]))

    @abc.abstractmethod
    def of_scores(
        self, scores: jax.Array, labels: jax.Array, weights: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the weighted loss, and metrics, of float32 scores [batch, length, outputs]; others [batch, length]."""


class ClassificationLoss(HeadLoss):
    """Cross entropy of classes 0 to outputs - 1; with one output, of the logistic probability of label 1."""

    @override
    def of_scores(
        self, scores: jax.Array, labels: jax.Array, weights: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the loss, and `accuracy`. A label that is no class makes both NaN: no class stands for it."""
        classes = max(2, scores.shape[-1])
        if scores.shape[-1] == 1:  # the other class has score 0
            scores = jnp.concatenate([jnp.zeros_like(scores), scores], axis=-1)
        targets = labels.astype(jnp.int32)
        known = (targets == labels) & (targets >= 0) & (targets < classes)
        weights = jnp.where(known | (weights == 0), weights, jnp.nan)
        loss = -jnp.sum(token_logprobs(scores, targets) * weights)
        return loss, {"accuracy": jnp.sum(token_hits(scores, targets) * weights)}


class RegressionLoss(HeadLoss):
    """Half the squared error of one score: of values, and of rewards that are numbers."""

    @override
    def of_scores(
        self, scores: jax.Array, labels: jax.Array, weights: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the loss."""
        error = one_score(scores, "RegressionLoss") - labels
        return 0.5 * jnp.sum(error * error * weights), {}


class PairwiseLoss(HeadLoss):
    """Bradley-Terry: -log sigmoid(chosen - rejected - margin) of the scores of two sequences' last tokens.

    Sequences of a pair stand side by side in a row, the chosen one first (see `input.labelled.preference`).
    Margins: Llama 2, arXiv 2307.09288, 3.2.2.
    """

    class Config(HeadLoss.Config):
        centre: float = 0.0  # weight of (chosen + rejected)^2, which keeps scores near 0 (arXiv 2312.09244, 2)

        @override
        def check_fields(self) -> None:
            self.require_least(0, "centre")

    @override
    def of_scores(
        self, scores: jax.Array, labels: jax.Array, weights: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the loss, `accuracy` (fraction of pairs in the right order) and `margin` (mean difference)."""
        rejected = one_score(scores, "PairwiseLoss")
        chosen = _before_sequence(rejected, positions)
        margin = chosen - rejected
        loss = jnp.sum(jax.nn.softplus(labels - margin) * weights)
        if self.cfg.centre:
            loss += self.cfg.centre * jnp.sum((chosen + rejected) ** 2 * weights)
        return loss, {"accuracy": jnp.sum((margin > 0) * weights), "margin": jnp.sum(margin * weights)}


def one_score(scores: jax.Array, name: str) -> jax.Array:
    """Return the scores [batch, length] of a head with one. UserError: it has more."""
    if scores.shape[-1] != 1:
        raise UserError(
            f"{name}: the decoder's head has {scores.shape[-1]} outputs; expected ScoreHead.Config.outputs=1"
        )
    return scores[..., 0]


def _before_sequence(x_bt: jax.Array, positions_bt: jax.Array) -> jax.Array:
    """Return for each token the value of the last token before its sequence; 0 for the first sequence of a row."""
    places = jnp.arange(x_bt.shape[1])
    at = (places == (places - positions_bt - 1)[:, :, None]).astype(x_bt.dtype)
    spec: Any = partition("batch", None)
    return jnp.einsum("bts,bs->bt", at, x_bt, precision=jax.lax.Precision.HIGHEST, out_sharding=spec)
