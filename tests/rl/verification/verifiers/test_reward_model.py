"""A reward model as a verifier: its scores are those of the model by itself, in any company, in processes too."""

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
from axlearn_like.config import ConfigError, set_path
from axlearn_like.input import LabelledInput, LabelledLines, Preference
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import Constant, Learner
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.training.head_losses import PairwiseLoss
from axlearn_like.training.trainer import Trainer
from mesh.errors import UserError
from models.tiny import tiny
from rl.tasks.encoding import encode_prompt
from rl.verification.inline import InlineVerifier
from rl.verification.service import Verifier
from rl.verification.verifiers.reward_model import RewardModel
from rl.verification.verifiers.self_test import CASES, Rows, self_test

pytestmark = pytest.mark.slow

ROWS = Rows.Config(rows=({"question": "2+2?", "answer": "4"}, {"question": "Who?", "answer": "Ada"}))
_LENGTH = 48
ANSWERS = ["4", "", "<eos>, a longer answer", "7"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[RewardModel.Config, Any]:
    """A reward model in a checkpoint, and its parameters."""
    cfg = tiny(vocab_size=ByteTokenizer.Config().build().vocab_size).clone(head=ScoreHead.Config())
    params = jax.jit(lambda: split(cfg.build(rngs=nnx.Rngs(3)))[1])()
    folder = tmp_path_factory.mktemp("model")
    checkpointer = Checkpointer.Config().build(directory=folder / "checkpoints")
    checkpointer.save(1, {"params": params, "step": jnp.int32(1)}, {})
    checkpointer.close()
    fields: dict[str, Any] = {"mixture": ROWS, "model": cfg, "tokenizer": ByteTokenizer.Config()}
    return RewardModel.Config(**fields, start_from=StartFrom.Config(path=str(folder))), params


def alone(cfg: RewardModel.Config, params: Any, asked: list[str], answers: list[str]) -> list[float]:
    """Return the scores at the last tokens of bos, question, newline, answer, eos: of rows with one sequence each."""
    tokenizer = ByteTokenizer.Config().build()
    rows = [
        [*encode_prompt(q, tokenizer), *tokenizer.encode(a), tokenizer.eos] for q, a in zip(asked, answers, strict=True)
    ]
    graphdef = split(build_abstract(cfg.model))[0]
    context = PackedContext(jnp.arange(_LENGTH)[None], jnp.ones((1, _LENGTH), jnp.int32))

    @jax.jit
    def scores(tokens: jax.Array) -> jax.Array:
        model = bind(graphdef, params)
        return model.scores(model.hidden(tokens, context).x, context)[0, :, 0]

    longer = [row + [0] * (_LENGTH - len(row)) for row in rows]  # what comes behind changes nothing before
    return [float(scores(jnp.asarray([one]))[len(row) - 1]) for one, row in zip(longer, rows, strict=True)]


@pytest.mark.numerics
def test_scores_are_those_of_the_model_by_itself_moved_and_scaled(model: tuple[RewardModel.Config, Any]):
    cfg, params = model
    scores = InlineVerifier.Config(scorer=cfg).build().score([0, 0, 0, 1], ANSWERS)
    wanted = alone(cfg, params, ["2+2?"] * 3 + ["Who?"], ANSWERS)
    np.testing.assert_allclose([score.reward for score in scores], wanted, atol=1e-5)
    assert len({score.reward for score in scores}) == 4 and all(score.status == "ok" for score in scores)
    moved = cfg.clone(centre=0.5, scale=2.0).build()
    assert moved.score(0, "4") == pytest.approx(2 * (wanted[0] - 0.5), abs=1e-5)


def test_a_model_without_a_score_or_without_parameters_is_refused(model: tuple[RewardModel.Config, Any]):
    cfg, _ = model
    with pytest.raises(ConfigError, match=r"RewardModel.model: expected a decoder with head=ScoreHead.Config\(\)"):
        cfg.clone(model=cfg.model.clone(head=ScoreHead.Config(outputs=2))).check_fields()
    with pytest.raises(ConfigError, match=r"RewardModel.start_from: expected StartFrom.Config\(path=...\)"):
        cfg.clone(start_from=None).check_fields()


def test_an_answer_longer_than_the_positions_of_the_model_has_no_reward(model: tuple[RewardModel.Config, Any]):
    cfg = model[0].clone()
    set_path(cfg.model, "block.attention.rope.max_length", 16)
    right, long = InlineVerifier.Config(scorer=cfg).build().score([0, 0], ["4", "a long answer"])
    assert (right.status, long.status) == ("ok", "error")
    with pytest.raises(UserError, match=r"answer to problem 0 .* is 20, but \S*model\.block\.\S+max_length is 16"):
        cfg.build().score(0, "a long answer")


def test_a_model_that_has_learned_nothing_fails_the_self_test(model: tuple[RewardModel.Config, Any]):
    result = self_test(lambda rows: model[0].clone(mixture=rows), CASES["reward_model"], ranked=True)
    assert 6 <= len(result.mistakes) <= result.tried == 6 + sum(len(case.wrong) for case in CASES["reward_model"])


@pytest.mark.full
def test_a_model_passes_the_self_test_on_what_it_was_trained_on(model: tuple[RewardModel.Config, Any], tmp_path: Path):
    """Bradley-Terry pairs of the very cases: the path from training by `axl train` to the verdicts is whole."""
    pairs = [
        {"prompt": case.row["question"], "chosen": case.right[0], "rejected": wrong}
        for case in CASES["reward_model"]
        for wrong in case.wrong
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tokenizer = ByteTokenizer.Config()
    source = LabelledLines.Config(files=str(tmp_path / "pairs.jsonl"), tokenizer=tokenizer, example=Preference.Config())
    trainer = Trainer.Config(
        model=model[0].model,
        input=LabelledInput.Config(source=source, seq_len=160, batch_size=12),
        loss=PairwiseLoss.Config(),
        learner=Learner.Config(schedule=Constant.Config(lr=3e-3)),
        checkpoint=Checkpointer.Config(save_every=100),
        mesh={"data": 1},
        num_steps=120,
    )
    assert trainer.build().run(tmp_path / "run", progress=False)["finished"]
    cfg = model[0].clone(start_from=StartFrom.Config(path=str(tmp_path / "run")))
    result = self_test(lambda rows: cfg.clone(mixture=rows), CASES["reward_model"], ranked=True)
    assert result.mistakes == ()


@pytest.mark.numerics
@pytest.mark.full
def test_processes_of_a_verifier_score_alike(model: tuple[RewardModel.Config, Any]):
    cfg, _ = model
    own = InlineVerifier.Config(scorer=cfg).build().score([0] * 4, ANSWERS)
    with Verifier.Config(scorer=cfg, processes=1, deadline_s=30.0).build() as verifier:
        scores = verifier.score([0] * 4, ANSWERS)
    np.testing.assert_allclose([one.reward for one in scores], [one.reward for one in own], atol=1e-6)
