"""Evaluators: periodic measurements of a trainer's parameters."""

import itertools
from typing import Any, Protocol, override

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.base import Params
from axlearn_like.training.losses import Loss, eval_step
from mesh import shard_batch
from mesh.batches import local_rows


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
        # Of a loss that compares with another policy (see alignment.scoring).
        self._scored = getattr(loss, "scored", lambda params, batch: batch)

    def run(self, params: Params, step: int) -> dict[str, float]:
        """Return `eval_loss` and, if the loss has one, `eval_accuracy`: means over all targets or examples learned.

        For averaged parameters they are `eval_averaged_loss` and `eval_averaged_accuracy`.
        """
        del step
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


@jax.jit
def _units(weights: jax.Array) -> jax.Array:
    """Return how many targets or examples a batch is a mean of: each has the same weight, and they sum to 1."""
    return jnp.round(1 / jnp.max(weights))
