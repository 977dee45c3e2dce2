"""Run directories: which config, which weights."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.config import set_path, to_text
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.base import Params
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.run.directory import RunDirectory
from axlearn_like.training.trainer import Trainer
from mesh import UserError, make_mesh
from rl.serving.policy import (
    SavedWeights,
    ServedModel,
    find_run,
    load_params,
    newest_weights,
    recorded_config,
    supervised_policy,
)
from rl.tasks.supervised import SupervisedSource
from tests.axlearn_like.tiny import tiny_trainer
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_run


def save(folder: Path, step: int, params: Params) -> None:
    checkpointer = Checkpointer.Config().build(directory=folder)
    checkpointer.save(step, {"params": params, "step": np.int32(step)}, {})
    checkpointer.close()


def policy_params(seed: int) -> Params:
    cfg = tiny_experiment()
    return tiny_params(cfg.policy, seed=seed)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with a warm start and two checkpoints of RL."""
    path = tmp_path_factory.mktemp("policy") / "run"
    with tiny_run(path, tiny_experiment()) as run:
        save(path / "warm_start" / "checkpoints", 9, policy_params(9))
        for step in (2, 10):
            save(path / "checkpoints" / "rl", step, policy_params(step))
    return run


def test_a_run_is_found_from_its_checkpoints_too(run: RunDirectory, tmp_path: Path) -> None:
    for path in (run.path, run.checkpoints, run.checkpoints / "rl", run.checkpoints / "rl" / "2"):
        found = find_run(path)
        assert found is not None and found.path == run.path
    assert find_run(tmp_path) is find_run(tmp_path / "none") is None


def test_the_newest_weights_are_those_of_rl(run: RunDirectory) -> None:
    rl = run.checkpoints / "rl"
    assert newest_weights(run) == newest_weights(run, run.path) == SavedWeights(rl / "10", 10)
    assert newest_weights(run, rl / "2") == SavedWeights(rl / "2", 2)


def test_before_rl_the_warm_starts_are_taken(run: RunDirectory, tmp_path: Path) -> None:
    with tiny_run(tmp_path / "run", tiny_experiment()) as young:
        assert newest_weights(young) is None
        save(young.path / "warm_start" / "checkpoints", 4, policy_params(4))
        assert newest_weights(young) == SavedWeights(young.path / "warm_start" / "checkpoints" / "4", 0)


@pytest.mark.slow
def test_weights_are_those_that_were_saved(run: RunDirectory) -> None:
    experiment = recorded_config(run).build()
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    for weights, seed in ((newest_weights(run), 10), (SavedWeights(run.path / "warm_start", 0), 9)):
        loaded = load_params(experiment, weights, mesh)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), policy_params(seed))


def test_weights_of_another_policy_are_refused(run: RunDirectory) -> None:
    cfg = recorded_config(run)
    policy = cfg.policy.clone(num_layers=2)  # pyright: ignore
    with pytest.raises(CheckpointError, match="checkpoint .*10"):
        load_params(cfg.set(policy=policy).build(), newest_weights(run), make_mesh({"data": 1}, jax.devices()[:1]))


@pytest.mark.slow
def test_random_weights_follow_the_seed() -> None:
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    one, same, other = (
        jax.device_get(load_params(tiny_experiment(seed=seed).build(), None, mesh)) for seed in (1, 1, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_a_run_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.txt").write_text("axlearn_like.learner:AdamW\n")
    with pytest.raises(UserError, match="is a run of axlearn_like.learner:AdamW"):
        recorded_config(RunDirectory.attach(tmp_path))


def supervised(**changes: Any) -> Trainer.Config:
    """A supervised trainer of the tiny policy on solved problems."""
    cfg: Any = tiny_experiment()
    source = SupervisedSource.Config(mixture=cfg.tasks, tokenizer=cfg.tokenizer, num_examples=8)
    rows = SupervisedInput.Config(source=source, seq_len=20, batch_size=2)
    return tiny_trainer(1).set(**{"model": cfg.policy, "input": rows, "evaluators": (), **changes})


def supervised_run(path: Path, step: int = 3) -> Path:
    with RunDirectory.open(path, to_text(supervised())) as run:
        save(run.checkpoints, step, policy_params(9))
    return path


@pytest.mark.slow
def test_a_supervised_runs_policy_has_the_tokenizer_and_the_tasks_of_its_data(tmp_path: Path) -> None:
    run, rl = RunDirectory.attach(supervised_run(tmp_path / "run")), tiny_experiment()
    cfg = recorded_config(run)
    assert isinstance(cfg, ServedModel.Config) and (cfg.max_prompt_tokens, cfg.max_new_tokens) == (20, 20)
    assert (cfg.policy, cfg.tokenizer, cfg.tasks) == (rl.policy, rl.tokenizer, rl.tasks)
    assert newest_weights(run) == newest_weights(run, run.checkpoints / "3") == SavedWeights(run.checkpoints / "3", 3)
    policy: Any = rl.policy
    short = policy.clone()
    set_path(short, "block.attention.rope.max_length", 31)  # prompts and answers as long as rows would be longer
    served = supervised_policy(supervised(model=short), tmp_path)
    served.check()
    assert (served.max_prompt_tokens, served.max_new_tokens) == (15, 15)
    with pytest.raises(UserError, match="is a run of a model with ScoreHead, which draws no words"):
        supervised_policy(supervised(model=policy.clone(head=ScoreHead.Config())), tmp_path)
    with pytest.raises(UserError, match=r"name 0 tokenizers; expected one.*start_from=StartFrom"):
        supervised_policy(tiny_trainer(1), tmp_path)
