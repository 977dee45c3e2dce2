"""Evaluators: periodic measurements of a trainer's parameters."""

import itertools
from typing import Any, Protocol, override

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input import SupervisedInput
from axlearn_like.kernels.attention.context_parallel.zigzag import reorder
from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.training.heads.chunked_head import map_chunks
from axlearn_like.training.losses import Batch, Loss, SupervisedLoss, eval_step, token_hits
from mesh import shard_batch
from mesh.batches import local_rows
from mesh.sharding import shard_like


class Evaluator(Protocol):
    """Periodic measurement; built by `config.build(graphdef=..., loss=...)` with the trainer's model and loss."""

    every: int  # steps between evaluations; the last step is always evaluated
    averaged: bool  # evaluates the learner's average of the parameters

    def run(self, params: Any, step: int) -> dict[str, float]:
        """Return scalars for the metrics row of `step`."""
        ...


class LossEvaluator(Configurable):
    """Loss and accuracy on an input that is not trained on: means over all that is learned, in any batches."""

    class Config(ConfigBase["LossEvaluator"]):
        input: SupervisedInput.Config = REQUIRED
        batches: int | None = None  # number of batches; None: each example once, from an input of one source
        every: int = 100  # steps between evaluations
        averaged: bool = False  # evaluate the learner's average of the parameters

        @override
        def check_fields(self) -> None:
            self.require_least(1, "batches", "every")

    def __init__(self, cfg: Config, *, graphdef: nnx.GraphDef[Any], loss: Loss):
        self.every, self.averaged = cfg.every, cfg.averaged
        data = cfg.input.build(rows=local_rows(cfg.input.batch_size))
        self._rows = cfg.input.batch_size
        # The same at every evaluation.
        first = None if cfg.batches is None else list(itertools.islice(data, cfg.batches))
        self._batches = data.one_epoch if first is None else lambda: iter(first)
        data.close()
        self._loss = eval_step(graphdef, loss)
        # Arrays that a comparison with another policy adds to a batch (see alignment.scoring).
        self._scored = getattr(loss, "scored", lambda params, batch: batch)

    def run(self, params: Params, step: int) -> dict[str, float]:
        """Return `eval_loss` and, if the loss has one, `eval_accuracy`: means over all targets or examples learned.

        For averaged parameters they are `eval_averaged_loss` and `eval_averaged_accuracy`.
        """
        results: list[Any] = []
        for arrays in self._batches():
            batch = shard_batch(arrays, rows=self._rows)
            metrics = self._loss(params, self._scored(params, batch))[1]
            kept = {name: metrics[name] for name in ("loss", "accuracy") if name in metrics}
            results.append((kept, _units(batch["weights"])))
        results = jax.device_get(results)
        total = sum(float(units) for _, units in results)
        prefix = "eval_averaged" if self.averaged else "eval"
        return {
            f"{prefix}_{name}": sum(float(found[name]) * float(units) for found, units in results) / total
            for name in results[0][0]
        }


class HeldOutEvaluator(LossEvaluator):
    """Loss, accuracy, and on texts the share of examples that greedy decoding would repeat; before any update, too.

    An answer is repeated if each of its tokens is the most likely one after those before it: no text is drawn.
    """

    before = True  # run on the parameters that training begins with; the event log has the scalars

    class Config(LossEvaluator.Config):
        chunks: int = 1  # parts into which a row's tokens are cut for the head, as the loss has it

    def __init__(self, cfg: Config, *, graphdef: nnx.GraphDef[Any], loss: Loss):
        super().__init__(cfg, graphdef=graphdef, loss=loss)
        self._texts = isinstance(loss, SupervisedLoss)

        @jax.jit
        def marks(params: Params, batch: Batch) -> jax.Array:
            """Return int32 [chunks, 3, batch, length]: segments, and 1 for what is learned, and for what is missed."""
            model, (batch, layout) = bind(graphdef, params), reorder(batch)
            x = model.hidden(batch["tokens"], PackedContext(batch["positions"], batch["segment_ids"], layout)).x

            def one(x: jax.Array, targets: jax.Array, learned: jax.Array, segments: jax.Array) -> jax.Array:
                missed = learned & ~token_hits(model.output.logits(x), targets)
                return jnp.stack([segments, learned.astype(jnp.int32), missed.astype(jnp.int32)])

            rest = (batch["targets"], batch["weights"] > 0, batch["segment_ids"])
            return map_chunks(one, cfg.chunks, x, *(shard_like(each, x) for each in rest))

        self._marks = marks

    @override
    def run(self, params: Params, step: int) -> dict[str, float]:
        """Return what `LossEvaluator` does, and `eval_exact`."""
        scalars = super().run(params, step)
        if self._texts:
            right = total = 0
            for arrays in self._batches():
                marked = jax.device_get(self._marks(params, shard_batch(arrays, rows=self._rows)))
                for segments, learned, missed in np.moveaxis(marked, 2, 0).swapaxes(1, 2):
                    total += len(np.unique(segments[learned > 0]))
                    right += len(np.setdiff1d(segments[learned > 0], segments[missed > 0]))
            scalars["eval_exact"] = right / max(1, total)
        return scalars


@jax.jit
def _units(weights: jax.Array) -> jax.Array:
    """Return how many targets or examples a batch is a mean of: each has the same weight, and they sum to 1."""
    return jnp.round(1 / jnp.max(weights))
