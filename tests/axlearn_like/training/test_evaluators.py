"""The loss evaluator measures what the loss function computes, on data that stays the same."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import config_for
from axlearn_like.input import FirstFit, InputError, Mixture, OneARow, Part, SupervisedInput
from axlearn_like.layers.base import bind
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.evaluators import HeldOutEvaluator, LossEvaluator
from axlearn_like.training.losses import SupervisedLoss, eval_step, supervised_loss
from mesh import make_mesh
from mesh.rules import use_mesh
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.axlearn_like.tiny import Counting, tiny_trainer
from tests.elsewhere import elsewhere


def counting() -> SupervisedInput.Config:
    return SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=2)


def uneven() -> Any:
    """Seven examples of 2 to 15 tokens, of which the first third is given."""
    tokens = np.random.default_rng(3).integers(0, 32, (7, 16)).astype(np.int32)
    sizes = [2, 15, 4, 9, 3, 12, 5]
    return [{"tokens": row[:n], "loss_mask": np.arange(n) >= n // 3} for row, n in zip(tokens, sizes, strict=True)]


@pytest.mark.full
@pytest.mark.numerics
def test_each_example_counts_once_whatever_the_batches_are():
    assert_each_counts_once(1)


@pytest.mark.full
def test_each_example_counts_once_on_two_devices():
    elsewhere(assert_each_counts_once, 2, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})


def assert_each_counts_once(devices: int) -> None:
    graphdef, params = initialise(small_decoder())
    loss, total, count = SupervisedLoss.Config().build(), 0.0, 0
    score: Any = jax.jit(lambda tokens, context: bind(graphdef, params)(tokens, context)[0])
    for example in uneven():
        tokens, mask = np.asarray(example["tokens"]), example["loss_mask"][1:]
        context = PackedContext(jnp.arange(len(tokens) - 1)[None], jnp.ones((1, len(tokens) - 1), jnp.int32))
        logits = np.asarray(score(tokens[None, :-1], context), np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= logprobs[np.arange(len(tokens) - 1), tokens[1:]][mask].sum()
        count += mask.sum()
    with use_mesh(make_mesh({"data": devices}, jax.devices()[:devices])):
        for batch_size, rows in itertools.product((2, 4, 6), (OneARow, FirstFit)):
            fields: dict[str, Any] = {"source": config_for(uneven), "seq_len": 16, "rows": rows.Config()}
            data = SupervisedInput.Config(**fields, batch_size=batch_size)
            evaluator = LossEvaluator.Config(input=data).build(graphdef=graphdef, loss=loss)
            found = [evaluator.run(params, step)["eval_loss"] for step in (0, 7)]
            np.testing.assert_allclose(found, [total / count] * 2, rtol=1e-5)


def greedy() -> Any:
    """The seven examples with greedy answers in place of what is learned; of three the last token differs."""
    graphdef, params = initialise(small_decoder())
    context = PackedContext(jnp.broadcast_to(jnp.arange(16), (7, 16)), jnp.ones((7, 16), jnp.int32))
    best = jax.jit(lambda tokens: jnp.argmax(bind(graphdef, params)(tokens, context), -1))
    examples, tokens = uneven(), np.zeros((7, 16), np.int32)
    for row, example in zip(tokens, examples, strict=True):
        row[: len(example["tokens"])] = example["tokens"]
    first = np.array([max(1, len(example["tokens"]) // 3) for example in examples])
    for at in range(1, 16):
        tokens[first <= at, at] = np.asarray(best(tokens))[first <= at, at - 1]
    for number, (row, example) in enumerate(zip(tokens, examples, strict=True)):
        example["tokens"] = row[: len(example["tokens"])]
        example["tokens"][-1] = (example["tokens"][-1] + number % 2) % 32
    return examples


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 4])
def test_greedy_exact_match_is_the_share_of_answers_that_decoding_repeats(chunks: int):
    graphdef, params = initialise(small_decoder())
    with use_mesh(make_mesh({}, jax.devices()[:1])):
        for rows in (OneARow, FirstFit):
            fields: dict[str, Any] = {"source": config_for(greedy), "seq_len": 16, "rows": rows.Config()}
            cfg = HeldOutEvaluator.Config(input=SupervisedInput.Config(**fields, batch_size=2), chunks=chunks)
            built = cfg.build(graphdef=graphdef, loss=SupervisedLoss.Config().build())
            assert built.run(params, 0)["eval_exact"] == 4 / 7


def test_a_mixture_has_no_end():
    parts = tuple(Part.Config(name=name, source=config_for(uneven)) for name in "ab")
    mixture = Mixture.Config(parts=parts)
    data = SupervisedInput.Config(source=mixture, seq_len=16, batch_size=2)
    with pytest.raises(InputError, match="a mixture of a, b has no end; name a number of batches"):
        next(data.build().one_epoch())


@pytest.mark.slow
@pytest.mark.numerics
def test_it_is_the_mean_of_the_loss_and_repeats():
    graphdef, params = initialise(small_decoder())
    evaluator = LossEvaluator.Config(input=counting(), batches=3).build(
        graphdef=graphdef, loss=SupervisedLoss.Config().build()
    )
    data, expected, units = counting().build(), [], []
    for _ in range(3):
        batch = jax.device_put(next(data))
        context = PackedContext(batch["positions"], batch["segment_ids"])
        expected.append(supervised_loss(bind(graphdef, params)(batch["tokens"], context), batch)[0])
        units.append(np.count_nonzero(batch["weights"]))
    first = evaluator.run(params, step=0)
    np.testing.assert_allclose(first["eval_loss"], np.average(expected, weights=units), rtol=1e-5)
    assert evaluator.run(params, step=7) == first


@pytest.mark.slow
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
