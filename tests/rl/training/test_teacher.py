"""Distillation on-policy: the policy's own rollouts, scored by a teacher of another shape."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.config import ConfigError, set_path
from axlearn_like.training.alignment.teacher import Teacher
from mesh import make_mesh
from mesh.errors import UserError
from rl.objective.presets import distillation
from tests.rl.tiny import tiny_experiment, tiny_params
from tests.rl.training.test_trainer import Roles, config


def taught(path: Path, **model: Any) -> Any:
    """An experiment with a teacher, wider than the policy, whose parameters are in a checkpoint at `path`."""
    cfg = config(objective=distillation(), num_steps=12)
    wider: Any = cfg.policy.clone(dim=2 * cfg.policy.dim, **model)  # pyright: ignore
    checkpointer = Checkpointer.Config().build(directory=path / "checkpoints")
    params = jax.tree.map(jnp.asarray, tiny_params(wider, seed=5, scale=1.5))
    checkpointer.save(1, {"params": params, "step": jnp.int32(1)}, {})
    checkpointer.close()
    cfg.trainer.reference = Teacher.Config(model=wider, start_from=StartFrom.Config(path=str(path)))
    cfg.trainer.checkpoint.set(save_every=4, keep=3)
    return cfg


def test_a_teacher_that_does_not_fit_is_refused_before_the_run(tmp_path: Path):
    cfg = taught(tmp_path)
    teacher, policy = cfg.trainer.reference, cfg.policy
    with jax.set_mesh(make_mesh()):
        teacher.check_policy(policy, {}, ())
        with pytest.raises(ConfigError, match=r"model: expected a model with vocab_size \d+ or more"):
            teacher.clone(model=teacher.model.clone(vocab_size=100)).check_policy(policy, {}, ())
        with pytest.raises(UserError, match=r"start_from: checkpoint .*shape"):
            teacher.clone(model=teacher.model.clone(dim=4 * policy.dim)).check_policy(policy, {}, ())
    set_path(teacher.model, "block.attention.rope.max_length", 16)
    with pytest.raises(
        UserError,
        match=r"max_prompt_tokens \+ max_new_tokens is 18, but \S*reference\.model\.block\.\S+max_length is 16",
    ):
        cfg.check("inprocess")
    with pytest.raises(ConfigError, match=r"start_from: expected StartFrom.Config\(path=RUN\)"):
        teacher.clone(start_from=None).check()
    plain = tiny_experiment(objective=distillation())
    with pytest.raises(ConfigError, match=r"regulariser: expected trainer\.reference, .* or Teacher\.Config"):
        plain.check("inprocess")


@pytest.mark.full
def test_the_policy_comes_near_its_teacher(tmp_path: Path):
    cfg = taught(tmp_path / "teacher")
    roles = Roles.make(tmp_path / "whole", cfg, initial=tiny_params(cfg.policy, scale=1.5))
    roles.advance(12)
    roles.trainer.close()
    rows = roles.rows()
    found = [row["kl_reference"] for row in rows]
    assert np.mean(found[-3:]) < 0.85 * np.mean(found[:3])
    assert all(row["advantage_abs_mean"] == 0 and row["update_norm"] > 0 for row in rows)
