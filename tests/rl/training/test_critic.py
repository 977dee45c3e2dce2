"""The critic: its loss, its values beside the rollouts, and PPO with it, which resumes to the bit."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import AdamW, Constant, Learner
from rl.objective import GeneralisedAdvantage, Objective
from rl.objective.presets import ppo
from rl.training.critic import Critic, value_loss
from tests.rl.tiny import tiny_experiment, tiny_params
from tests.rl.training.test_trainer import Roles, config, host

LEARNER = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-2), clip_norm=1.0)


def with_critic(**fields: Any) -> Any:
    cfg = config(objective=ppo(Critic.Config(learner=LEARNER.clone(), **fields)), num_steps=8)
    cfg.trainer.checkpoint.set(save_every=2, keep=9)
    return cfg


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_loss_is_the_larger_of_two_squares_in_float64(clip: float | None):
    rng = np.random.default_rng(0)
    values, returns, before = (rng.normal(size=(3, 6)).astype(np.float32) for _ in range(3))
    weights = rng.random((3, 6)).astype(np.float32)
    (loss, metrics), gradient = jax.value_and_grad(
        lambda v: value_loss(v, jnp.asarray(returns), jnp.asarray(before), jnp.asarray(weights), clip=clip),
        has_aux=True,
    )(jnp.asarray(values))
    total, exact, clipped = 0.0, np.zeros((3, 6)), 0.0
    for at in np.ndindex(3, 6):
        v, r, b, w = (float(x[at]) for x in (values, returns, before, weights))
        near = v if clip is None else b + min(max(v - b, -clip), clip)
        total += 0.5 * w * max((v - r) ** 2, (near - r) ** 2)
        within = near == v or (v - r) ** 2 >= (near - r) ** 2
        exact[at] = w * (v - r) if within else 0.0
        clipped += w * ((near - r) ** 2 > (v - r) ** 2)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["value_clip_fraction"], clipped, rtol=1e-5, atol=1e-7)


def test_what_cannot_work_is_refused_before_the_run():
    alone = tiny_experiment(objective=Objective.Config(advantage=GeneralisedAdvantage.Config()))
    with pytest.raises(ConfigError, match=r"objective\.advantage\.critic"):
        alone.check("inprocess")
    with pytest.raises(ConfigError, match=r"model: expected a decoder with head=ScoreHead\.Config\(\), or None"):
        Critic.Config(learner=LEARNER.clone(), model=tiny_experiment().policy).check()
    small: Any = tiny_experiment().policy.clone(vocab_size=100, head=ScoreHead.Config())
    with pytest.raises(ConfigError, match=r"model: expected a vocab_size of \d+ or more"):
        Critic.Config(learner=LEARNER.clone(), model=small).of_policy(tiny_experiment().policy)
    with pytest.raises(ConfigError, match=r"value_clip: expected a number above 0, or None"):
        Critic.Config(learner=LEARNER.clone(), value_clip=0.0).check()


@pytest.mark.full
def test_ppo_learns_with_its_critic_and_resumes_to_the_bit(tmp_path: Path):
    cfg = with_critic()
    initial = tiny_params(cfg.policy)
    whole = Roles.make(tmp_path / "whole", cfg, initial=initial)
    whole.advance(8)
    whole.trainer.close()
    rows = whole.rows()
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2])
    assert rows[0]["value_mean"] == 0 and rows[-1]["value_mean"] > 0.3 * rewards[-1]
    assert rows[-1]["value_loss"] < 0.7 * rows[0]["value_loss"]

    part = Roles.make(tmp_path / "part", cfg, initial=initial)
    part.advance(4)
    part.crash()  # a checkpoint of update 4 is there
    again = Roles.make(tmp_path / "part", cfg)
    again.advance(8)
    again.trainer.close()
    assert host(again.trainer.state) == host(whole.trainer.state)
    assert [row["value_loss"] for row in again.rows()] == [row["value_loss"] for row in rows]
