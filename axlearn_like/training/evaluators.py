"""Evaluators: periodic measurements of a trainer's parameters."""

from typing import Any, Protocol, override

import jax
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.base import Params
from axlearn_like.training.losses import Loss, eval_step
from mesh import shard_batch
from mesh.batches import local_rows


class Evaluator(Protocol):
    """Periodic measurement; built by `config.build(graphdef=..., loss=...)` with the trainer's model and loss."""

    every: int  # steps; the last step is always measured
    averaged: bool  # of the learner's average of the parameters

    def run(self, params: Any, step: int) -> dict[str, float]:
        """Return scalars for the metrics row of `step`."""
        ...


class LossEvaluator(Configurable):
    """Loss and accuracy on the first batches of an input that is not trained on."""

    class Config(ConfigBase["LossEvaluator"]):
        input: SupervisedInput.Config = REQUIRED
        batches: int = 4
        every: int = 100  # steps
        averaged: bool = False  # of the learner's average of the parameters

        @override
        def check_fields(self) -> None:
            self.require_least(1, "batches", "every")

    def __init__(self, cfg: Config, *, graphdef: nnx.GraphDef[Any], loss: Loss):
        self.every, self.averaged = cfg.every, cfg.averaged
        data = cfg.input.build(rows=local_rows(cfg.input.batch_size))
        self._rows = cfg.input.batch_size
        self._batches = [next(data) for _ in range(cfg.batches)]  # the same at every evaluation
        data.close()
        self._loss = eval_step(graphdef, loss)
        # Of a loss that compares with another policy (see alignment.scoring).
        self._scored = getattr(loss, "scored", lambda params, batch: batch)

    def run(self, params: Params, step: int) -> dict[str, float]:
        """Return `eval_loss` and, if the loss has one, `eval_accuracy`: means over the batches, which count alike.

        For averaged parameters they are `eval_averaged_loss` and `eval_averaged_accuracy`.
        """
        del step
        batches = (shard_batch(batch, rows=self._rows) for batch in self._batches)
        scored = (self._scored(params, batch) for batch in batches)
        results = jax.device_get([self._loss(params, batch)[1] for batch in scored])
        prefix = "eval_averaged" if self.averaged else "eval"
        return {
            f"{prefix}_{name}": float(sum(result[name] for result in results) / len(results))
            for name in ("loss", "accuracy")
            if name in results[0]
        }
