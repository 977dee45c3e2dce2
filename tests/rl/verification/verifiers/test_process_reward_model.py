"""A process reward model as a verifier: steps are scored where the model was trained to judge them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.config import ConfigError
from axlearn_like.input import LabelledInput, LabelledLines, StepLabels
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import Constant, Learner
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.training.head_losses import ClassificationLoss
from axlearn_like.training.trainer import Trainer
from models.tiny import tiny
from rl.verification.verifiers.process_reward_model import ProcessRewardModel
from rl.verification.verifiers.self_test import Rows

pytestmark = pytest.mark.slow

BYTES = ByteTokenizer.Config()
QUESTIONS = [f"{a} + {b} + {c}?" for a in range(1, 5) for b in range(1, 5) for c in range(1, 5)]
ROWS = Rows.Config(rows=tuple({"question": question, "answer": ""} for question in QUESTIONS))
ANSWER = "1 + 1 = 2\n2 + 1 = 3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProcessRewardModel.Config, Any]:
    """A model with random parameters in a checkpoint, and these."""
    cfg = tiny(vocab_size=BYTES.build().vocab_size).clone(head=ScoreHead.Config())
    params = jax.jit(lambda: split(cfg.build(rngs=nnx.Rngs(3)))[1])()
    folder = tmp_path_factory.mktemp("model")
    checkpointer = Checkpointer.Config().build(directory=folder / "checkpoints")
    checkpointer.save(1, {"params": params, "step": jnp.int32(1)}, {})
    checkpointer.close()
    start = StartFrom.Config(path=str(folder))
    return ProcessRewardModel.Config(mixture=ROWS, model=cfg, tokenizer=BYTES, start_from=start), params


def probabilities(cfg: ProcessRewardModel.Config, params: Any, question: str, answer: str) -> np.ndarray:
    """Return the model's own probability at the end of each line: of a text that ends there."""
    graphdef, found, length = split(build_abstract(cfg.model))[0], [], 64
    context = PackedContext(jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))

    @jax.jit
    def scores(tokens: jax.Array) -> jax.Array:
        decoder = bind(graphdef, params)
        return jax.nn.sigmoid(decoder.scores(decoder.hidden(tokens, context).x, context)[0, :, 0])

    for end in range(1, answer.count("\n") + 2):
        text = question + "\n" + "\n".join(answer.split("\n")[:end]) + "\n"
        tokens = [BYTES.build().bos, *BYTES.build().encode(text)]
        found.append(scores(jnp.asarray([tokens + [0] * (length - len(tokens))]))[len(tokens) - 1])
    return np.asarray(found)


@pytest.mark.numerics
def test_an_answer_is_judged_by_the_ends_of_its_lines(model: tuple[ProcessRewardModel.Config, Any]):
    cfg, params = model
    steps = probabilities(cfg, params, QUESTIONS[0], ANSWER)
    assert abs(steps[0] - steps[1]) > 1e-3
    # Blank steps and a last separator change nothing; answers are scored alike in any company.
    found = cfg.build().score_samples(0, [ANSWER, ANSWER + "\n\n \n", "one"], [])
    np.testing.assert_allclose(found[:2], steps.min(), atol=1e-5)
    assert found[2] != found[0]


@pytest.mark.numerics
def test_steps_are_combined_as_the_config_says(model: tuple[ProcessRewardModel.Config, Any]):
    logits, steps = np.log([3.0, 1.0, 4.0]), np.array([0.75, 0.5, 0.8])
    wanted = {"min": 0.5, "mean": steps.mean(), "product": 0.3, "last": 0.8}
    for aggregate, score in wanted.items():
        assert ProcessRewardModel(model[0].clone(aggregate=aggregate)).combined(logits) == pytest.approx(score)
    found = ProcessRewardModel(model[0].clone(aggregate="last", probabilities=False)).combined(logits)
    assert found == pytest.approx(np.log(4.0))


def test_tokens_are_those_of_training(model: tuple[ProcessRewardModel.Config, Any]):
    verifier = ProcessRewardModel(model[0])
    record = {"prompt": QUESTIONS[5], "completions": ANSWER, "labels": [1, 0]}
    learned = StepLabels.Config().build(tokenizer=BYTES.build()).encode(record, "here")
    tokens, ends = verifier.scored(ROWS.build().problem(5), ANSWER)
    assert tokens == learned["tokens"].tolist()
    assert ends == np.flatnonzero(~np.isnan(learned["labels"])).tolist()


def test_a_product_of_scores_that_may_be_negative_is_refused(model: tuple[ProcessRewardModel.Config, Any]):
    with pytest.raises(ConfigError, match=r"ProcessRewardModel.aggregate: expected min, mean or last"):
        model[0].clone(aggregate="product", probabilities=False).check_fields()


@pytest.mark.full
def test_a_model_that_learned_steps_by_axl_train_finds_the_wrong_one(
    model: tuple[ProcessRewardModel.Config, Any], tmp_path: Path
):
    """Train on a file of labelled steps: a wrong sign, in the first or in the second step, then scores lower."""

    def solution(question: str, *signs: str) -> list[str]:
        a, b, c = question.rstrip("?").split(" + ")
        return [f"{a} {signs[0]} {b}", f"{signs[1]} {c}"]

    signs = ["++", "-+", "+-"]
    records = [
        {"prompt": question, "completions": solution(question, *both), "labels": [sign == "+" for sign in both]}
        for question in QUESTIONS
        for both in signs
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = LabelledLines.Config(files=str(tmp_path / "steps.jsonl"), tokenizer=BYTES, example=StepLabels.Config())
    trainer = Trainer.Config(
        model=model[0].model,
        input=LabelledInput.Config(source=source, seq_len=128, batch_size=8),
        loss=ClassificationLoss.Config(),
        learner=Learner.Config(schedule=Constant.Config(lr=3e-3)),
        checkpoint=Checkpointer.Config(save_every=80),
        mesh={"data": 1},
        num_steps=80,
    )
    assert trainer.build().run(tmp_path / "run", progress=False)["finished"]
    verifier = model[0].clone(start_from=StartFrom.Config(path=str(tmp_path / "run"))).build()
    for number, question in enumerate(QUESTIONS[:8]):
        right, *wrong = verifier.score_samples(number, ["\n".join(solution(question, *both)) for both in signs], [])
        assert right > 0.9 and max(wrong) < 0.1, (question, right, wrong)
