"""Losses of heads against float64 references, on the batches of `LabelledInput`."""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import ConfigBase, ConfigError, Configurable
from axlearn_like.input import (
    FirstFit,
    InputError,
    LabelledInput,
    LabelledLines,
    StepLabels,
    SupervisedInput,
    labelled_text,
    preference,
)
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import Constant, Learner
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.head_losses import ClassificationLoss, HeadLoss, PairwiseLoss, RegressionLoss
from axlearn_like.training.losses import make_supervised_loss
from axlearn_like.training.trainer import Trainer
from mesh.errors import UserError
from tests.axlearn_like.input.data import BYTES, json_lines
from tests.axlearn_like.layers.small import initialise, small_decoder

pytestmark = pytest.mark.numerics


class Pairs(Configurable):
    """Pairs of sequences of any lengths; the margin of pair i is i / 10."""

    labelled = True

    class Config(ConfigBase["Pairs"]):
        count: int = 12

    def __init__(self, cfg: Config):
        rng = np.random.default_rng(0)
        self.pairs = [[rng.integers(0, 40, rng.integers(1, 7)) for _ in range(2)] for _ in range(cfg.count)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return preference(*self.pairs[index], margin=index / 10)


class Labels(Pairs):
    """The first sequences of `Pairs`: sequence i is of class i % 3."""

    class Config(Pairs.Config):
        pass

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return labelled_text(self.pairs[index][0], index % 3)


def loss_of(cfg: HeadLoss.Config) -> HeadLoss:
    return cast(HeadLoss, cfg.build())


def batch_of(source: ConfigBase[Any], rows: int = 4) -> dict[str, np.ndarray]:
    """Return the one batch that holds every example."""
    cfg = LabelledInput.Config(source=source, seq_len=24, batch_size=rows, rows=FirstFit.Config(window=12), prefetch=0)
    data = cfg.build()
    batch = next(data)
    data.close()
    return batch


def test_a_pair_stands_side_by_side_and_only_its_end_has_a_label():
    batch, source = batch_of(Pairs.Config()), Pairs.Config().build()
    assert batch["targets"].dtype == np.float32
    rows, ends = np.nonzero(batch["weights"])
    assert len(ends) == 12
    np.testing.assert_allclose(batch["weights"][rows, ends], 1 / 12, rtol=1e-6)
    for row, end in zip(rows, ends, strict=True):
        chosen, rejected = source.pairs[round(batch["targets"][row, end] * 10)]
        start = end + 1 - len(chosen) - len(rejected)
        np.testing.assert_array_equal(batch["tokens"][row, start : end + 1], [*chosen, *rejected])
        positions = [*range(len(chosen)), *range(len(rejected))]
        np.testing.assert_array_equal(batch["positions"][row, start : end + 1], positions)
        assert len(set(batch["segment_ids"][row, start : end + 1])) == 2


def test_bradley_terry_is_its_formula_in_float64_for_any_packing():
    batch, pairs = batch_of(Pairs.Config()), Pairs.Config().build().pairs
    scores = np.random.default_rng(2).normal(size=batch["tokens"].shape).astype(np.float32)
    rows, ends = np.nonzero(batch["weights"])
    margins, differences, sums = [], [], []
    for row, end in zip(rows, ends, strict=True):
        margins.append(batch["targets"][row, end].astype(np.float64))
        rejected = scores[row, end].astype(np.float64)
        chosen = scores[row, end - len(pairs[round(margins[-1] * 10)][1])].astype(np.float64)
        differences.append(chosen - rejected)
        sums.append(chosen + rejected)
    difference, both = np.array(differences), np.array(sums)
    expected = np.mean(np.log1p(np.exp(np.array(margins) - difference)) + 0.5 * both**2)
    arrays = [jnp.asarray(batch[name]) for name in ("targets", "weights", "positions")]
    loss, metrics = loss_of(PairwiseLoss.Config(centre=0.5)).of_scores(jnp.asarray(scores)[..., None], *arrays)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(difference > 0), rtol=1e-5)
    np.testing.assert_allclose(metrics["margin"], np.mean(difference), rtol=1e-4)


@pytest.mark.slow
def test_classes_and_values_are_their_formulas_in_float64():
    batch = batch_of(Labels.Config(), rows=2)
    labels, weights, positions = (jnp.asarray(batch[name]) for name in ("targets", "weights", "positions"))
    at = np.nonzero(batch["weights"])
    assert len(at[0]) == 12
    classes = batch["targets"][at].astype(int)
    scores = np.random.default_rng(3).normal(size=(*batch["tokens"].shape, 3)).astype(np.float32)
    exact = scores[at].astype(np.float64)
    logprobs = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    loss, metrics = loss_of(ClassificationLoss.Config()).of_scores(jnp.asarray(scores), labels, weights, positions)
    np.testing.assert_allclose(loss, -logprobs[np.arange(12), classes].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(exact.argmax(-1) == classes), rtol=1e-5)

    one = jnp.asarray(scores[..., :1])
    loss, _ = loss_of(RegressionLoss.Config()).of_scores(one, labels, weights, positions)
    np.testing.assert_allclose(loss, 0.5 * np.mean((exact[:, 0] - classes) ** 2), rtol=1e-5)
    right = jnp.where(weights > 0, labels == 1, 0).astype(jnp.float32)
    loss, metrics = loss_of(ClassificationLoss.Config()).of_scores(one, right, weights, positions)
    signed = np.where(classes == 1, exact[:, 0], -exact[:, 0])
    np.testing.assert_allclose(loss, np.mean(np.log1p(np.exp(-signed))), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(signed > 0), rtol=1e-5)
    wrong = loss_of(ClassificationLoss.Config()).of_scores(one, labels, weights, positions)[0]
    assert np.isnan(wrong), "class 2 of a logistic head"


@pytest.mark.slow
def test_the_gradient_of_a_whole_model_adds_up_over_microbatches():
    batch = {name: jnp.asarray(array) for name, array in batch_of(Pairs.Config()).items()}
    graphdef, params = initialise(small_decoder(num_layers=1, head=ScoreHead.Config()))
    grad = jax.jit(jax.grad(make_supervised_loss(graphdef, PairwiseLoss.Config().build()), has_aux=True))
    whole, metrics = grad(params, batch)
    halves = [grad(params, {name: array[part] for name, array in batch.items()})[0] for part in (slice(2), slice(2, 4))]
    added = jax.tree.map(jnp.add, *halves)
    assert float(jnp.abs(whole["head"]["weight_dv"]).max()) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), whole, added)
    assert metrics["tokens"] == np.sum(batch["segment_ids"] > 0)


@pytest.mark.full
def test_a_process_reward_model_learns_to_judge_each_step(tmp_path: Path):
    """Steps a+1=b, some of them wrong, read from JSON lines; those of unseen chains are judged."""
    rng = np.random.default_rng(0)

    def chain() -> dict[str, Any]:
        starts, right = rng.integers(0, 9, 4), rng.random(4) < 0.5
        ends = np.where(right, starts + 1, (starts + 1 + rng.integers(1, 9, 4)) % 10)
        steps = [f"{a}+1={b}" for a, b in zip(starts, ends, strict=True)]
        return {"prompt": "count", "completions": steps, "labels": right.tolist()}

    def rows(name: str, count: int) -> LabelledInput.Config:
        files = json_lines(tmp_path / name, *(chain() for _ in range(count)))
        source = LabelledLines.Config(files=files, tokenizer=BYTES, example=StepLabels.Config())
        return LabelledInput.Config(source=source, seq_len=96, batch_size=16)

    cfg = Trainer.Config(
        model=small_decoder(vocab_size=BYTES.build().vocab_size, num_layers=2, head=ScoreHead.Config()),
        input=rows("train.jsonl", 600),
        loss=ClassificationLoss.Config(),
        learner=Learner.Config(schedule=Constant.Config(lr=3e-3)),
        checkpoint=Checkpointer.Config(save_every=1000),
        mesh={"data": 1},
        num_steps=300,
        evaluators=(LossEvaluator.Config(input=rows("unseen.jsonl", 80), batches=2, every=300),),
    )
    assert cfg.build().run(tmp_path / "run", progress=False)["finished"]
    measured = [row["eval_accuracy"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "eval_accuracy" in row]
    assert measured[-1] > 0.95, measured


def test_bad_data_is_refused_by_name():
    class Bare(Labels):
        class Config(Labels.Config):
            pass

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return labelled_text(self.pairs[index][0], np.nan)

    with pytest.raises(InputError, match=r"example \d+ of Bare: .*with at least one label"):
        batch_of(Bare.Config())
    with pytest.raises(InputError, match="expected a LabelledInput for examples with labels"):
        SupervisedInput.Config(source=Labels.Config(), seq_len=24, batch_size=4).build()
    with pytest.raises(ConfigError, match=r"long: expected refuse"):
        LabelledInput.Config(source=Labels.Config(), seq_len=24, batch_size=4, long="split").check()
    with pytest.raises(UserError, match=r"PairwiseLoss: the decoder's head has 3 outputs; expected ScoreHead"):
        loss_of(PairwiseLoss.Config()).of_scores(jnp.zeros((1, 2, 3)), *[jnp.zeros((1, 2))] * 3)
