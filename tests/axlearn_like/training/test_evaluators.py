"""The loss evaluator measures what the loss function computes, on data that stays the same."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.input import SupervisedInput
from axlearn_like.layers.base import bind
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.losses import SupervisedLoss, eval_step, supervised_loss
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.axlearn_like.tiny import Counting, tiny_trainer


def counting() -> SupervisedInput.Config:
    return SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=2)


@pytest.mark.numerics
def test_it_is_the_mean_of_the_loss_and_repeats():
    graphdef, params = initialise(small_decoder())
    evaluator = LossEvaluator.Config(input=counting(), batches=3).build(
        graphdef=graphdef, loss=SupervisedLoss.Config().build()
    )
    data, expected = counting().build(), []
    for _ in range(3):
        batch = jax.device_put(next(data))
        context = PackedContext(batch["positions"], batch["segment_ids"])
        expected.append(supervised_loss(bind(graphdef, params)(batch["tokens"], context), batch)[0])
    first = evaluator.run(params, step=0)
    np.testing.assert_allclose(first["eval_loss"], np.mean(expected), rtol=1e-5)
    assert evaluator.run(params, step=7) == first


def test_the_trainer_writes_it(tmp_path):
    evaluator = LossEvaluator.Config(input=counting(), batches=1, every=2)
    tiny_trainer(4, evaluators=(evaluator,)).build().run(tmp_path / "run", progress=False)
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in row]
    assert [row["step"] for row in rows] == [2, 4]
    assert rows[0]["eval_loss"] != rows[1]["eval_loss"]


@pytest.mark.parametrize("chunks", [1, 4])
def test_it_uses_the_chunks_of_the_loss(chunks: int):
    """No array holds the logits of all tokens with chunks, neither in an evaluation nor in its compiled program."""
    graphdef, params = initialise(small_decoder())
    vocab = small_decoder().vocab_size
    data = counting().build()
    step: Any = eval_step(graphdef, SupervisedLoss.Config(chunks=chunks).build())
    text = str(step.trace(params, jax.device_put(next(data))).jaxpr)
    assert (f"f32[2,16,{vocab}]" in text) == (chunks == 1)
    assert f"f32[2,{16 // chunks},{vocab}]" in text
    data.close()
