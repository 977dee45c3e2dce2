"""The critic: its loss, its values beside the rollouts, and PPO with it, which resumes to the bit."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError, set_path
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import AdamW, Constant, Learner
from mesh import UserError, make_mesh, to_named_sharding
from rl.objective import GeneralisedAdvantage, Objective
from rl.objective.presets import ppo
from rl.protocol.headers import header_of
from rl.protocol.messages import contents_of
from rl.training.batching import PaddedRows
from rl.training.critic import Critic
from rl.training.critic.values import value_loss
from tests.elsewhere import elsewhere
from tests.rl.tiny import make_group, make_prompt, tiny_experiment, tiny_params, tiny_policy
from tests.rl.training.critic.packed import assert_packed_rows_learn_the_same
from tests.rl.training.test_trainer import Roles, config, host

pytestmark = pytest.mark.numerics

LEARNER = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-2), clip_norm=1.0)


def with_critic(**fields: Any) -> Any:
    cfg = config(objective=ppo(Critic.Config(learner=LEARNER.clone(), **fields)), num_steps=8)
    cfg.trainer.checkpoint.set(save_every=2, keep=9)
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_loss_is_the_larger_of_two_squares_in_float64(clip: float | None):
    rng = np.random.default_rng(0)
    values, returns, before = (rng.normal(size=(3, 6)).astype(np.float32) for _ in range(3))
    weights = rng.random((3, 6)).astype(np.float32)
    batch = {"returns": jnp.asarray(returns), "values": jnp.asarray(before), "weights": jnp.asarray(weights)}
    (loss, metrics), gradient = jax.value_and_grad(lambda v: value_loss(v, batch, clip=clip), has_aux=True)(
        jnp.asarray(values)
    )
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
    short: Any = tiny_experiment().policy.clone(head=ScoreHead.Config())
    set_path(short, "block.attention.rope.max_length", 16)
    long = tiny_experiment(objective=ppo(Critic.Config(learner=LEARNER.clone(), model=short)))
    with pytest.raises(
        UserError, match=r"max_prompt_tokens \+ max_new_tokens is 18, but \S*critic\.model\.block\.\S+max_length is 16"
    ):
        long.check("inprocess")


@pytest.mark.slow
def test_its_programs_are_traced_from_what_an_update_gets():
    """`axl aot` and `--plan` compile them: as many rows as rollouts, and the critic's state apart from the policy's."""
    cfg = tiny_experiment(objective=ppo(Critic.Config(learner=LEARNER.clone())))
    programs = cfg.programs(jax.devices()[:1])
    assert {"critic", "values"} <= programs.keys() and "critic" not in tiny_experiment().programs(jax.devices()[:1])
    update, values = programs["critic"](), programs["values"]()
    assert (update.rows, update.length) == (values.rows, values.length) == (16, 32)
    assert update.flops == pytest.approx(3 * values.flops) and values.trace().out_info.shape == (16, 32)
    state, metrics = update.trace().out_info
    assert "head" in state["params"] and {"value_loss", "grad_norm"} <= metrics.keys()


@pytest.mark.full
@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"data": 4, "tensor": 2}, {"sequence": 4, "fsdp": 2}], ids=str)
def test_on_eight_devices_values_and_updates_are_those_of_one(shape: dict[str, int]):
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    one, many = elsewhere(updated, shape, environ=eight, timeout=300)
    assert one.keys() == many.keys() and np.any(one["values"])
    for name, value in many.items():
        np.testing.assert_allclose(value, one[name], rtol=1e-3, atol=1e-5, err_msg=name)


def updated(shape: dict[str, int]) -> list[dict[str, Any]]:
    """Return values, metrics and a few parameters after two updates, on one device and on a mesh."""
    rng, found = np.random.default_rng(0), []
    groups = [
        make_group(make_prompt(g), [rng.integers(0, 256, 1 + i) for i in range(4)], [1, 0, 1, 0]) for g in range(4)
    ]
    headers, contents = [header_of(group) for group in groups], contents_of(groups)
    mask = np.arange(6) < np.array([len(r.tokens) for group in groups for r in group.rollouts])[:, None]
    returns = np.where(mask, np.tile([1.0, 0.0], 8)[:, None], 0.0)
    for axes in ({}, shape):
        mesh = make_mesh(axes, jax.devices()[: 8 if axes else 1])
        with jax.set_mesh(mesh):
            policy = tiny_policy()
            abstract = split(build_abstract(policy))[1]
            places = jax.tree.map(lambda leaf: leaf.sharding, to_named_sharding(abstract, mesh))
            sizes = PaddedRows(12, 6, row_multiple=8)
            critic = Critic.Config(learner=LEARNER.clone()).build(policy=policy, sizes=sizes)
            critic.start(jax.device_put(tiny_params(policy), places))
            metrics: dict[str, float] = {}
            for _ in range(2):
                values = critic.values(headers, contents, {})
                metrics = critic.update(headers, contents, values, returns, mask)
            head = np.asarray(jax.tree.leaves(critic.saved()["critic"]["params"]["head"])[0])
            found.append({**metrics, "values": values.ravel().tolist(), "head": head.ravel().tolist()})
    return found


@pytest.mark.full
def test_packed_rows_have_the_advantages_of_padded_ones(tmp_path: Path):
    """The critic scores whole rollouts; where they lie in the policy's rows changes nothing but sums."""
    assert_packed_rows_learn_the_same(with_critic, tmp_path)


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
