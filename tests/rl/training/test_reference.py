"""Reference policies: which parameters each has, what is held twice, and what a checkpoint keeps of them."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.base import Params
from axlearn_like.training.alignment.reference import FrozenCopy, MovingAverage, Reference, WithoutAdapters
from experiments.modifiers import low_rank
from rl.objective import ReferencePenalty
from rl.objective.presets import grpo
from rl.training.packing import Packing
from tests.rl.tiny import tiny_experiment, tiny_params
from tests.rl.training.test_trainer import Roles, config, host

FROZEN = ("base/w", "head")


def policy(value: float) -> Params:
    """A base that stays, and an adapter and a scale that are trained."""
    lora = {"w_a": jnp.full(3, value), "w_b": jnp.full(2, -value)}
    return {"base": {"w": jnp.ones(4), "lora": lora}, "head": jnp.zeros(2), "scale": jnp.full(1, value)}


def built(cfg: Reference.Config, *values: float) -> tuple[Reference, Params]:
    """The reference after an update to each of these values, and the policy."""
    reference = cfg.build(frozen=FROZEN)
    reference.start(policy(values[0]))
    for step, value in enumerate(values[1:], start=1):
        reference.updated(step, policy(value))
    return reference, policy(values[-1])


def test_a_frozen_copy_is_version_0_and_shares_what_is_frozen():
    reference, now = built(FrozenCopy.Config(), 1.0, 2.0, 3.0)
    params = reference.params(now)
    assert host(params) == host(policy(1.0))
    assert params["base"]["w"] is now["base"]["w"] and params["head"] is now["head"]
    assert sorted(host(reference.saved())) == [
        f"['constant']['reference']{key}" for key in ("['base']['lora']['w_a']", "['base']['lora']['w_b']", "['scale']")
    ]


def test_a_frozen_copy_can_be_taken_again_every_so_many_updates():
    for last, expected in ((1, 0.0), (2, 2.0), (3, 2.0), (4, 4.0)):
        reference, now = built(FrozenCopy.Config(reset_every=2), *(float(v) for v in range(last + 1)))
        assert host(reference.params(now)) == host(policy(expected))


def test_without_adapters_is_the_base_and_holds_nothing_else_twice():
    reference, now = built(WithoutAdapters.Config(), 1.0, 5.0)
    params = reference.params(now)
    jax.tree.map(np.testing.assert_array_equal, params, {**policy(0.0), "scale": jnp.full(1, 5.0)})
    assert params["base"]["w"] is now["base"]["w"] and params["scale"] is now["scale"] and reference.saved() == {}


def test_a_moving_average_is_that_of_float64():
    values = [1.0, 2.0, -3.0, 0.5]
    reference, now = built(MovingAverage.Config(decay=0.9), *values)
    expected = values[0]
    for value in values[1:]:
        expected = 0.9 * expected + 0.1 * value
    params = reference.params(now)
    np.testing.assert_allclose(params["scale"], expected, rtol=1e-6)
    np.testing.assert_allclose(params["base"]["lora"]["w_b"], -expected, rtol=1e-6)
    assert params["base"]["w"] is now["base"]["w"]


@pytest.mark.parametrize("cfg", [FrozenCopy.Config(reset_every=2), MovingAverage.Config(decay=0.9)])
def test_what_is_described_saved_and_restored_is_one(cfg: Reference.Config):
    reference, now = built(cfg, 1.0, 2.0, 4.0)
    described, saved = reference.describe(jax.eval_shape(lambda: policy(0.0))), reference.saved()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), described) == jax.tree.map(lambda x: (x.shape, x.dtype), saved)
    other, state = cfg.build(frozen=FROZEN), {"step": 2, **saved}
    other.restore(state)
    assert state == {"step": 2} and host(other.params(now)) == host(reference.params(now))


def test_adapters_off_need_adapters_on_a_frozen_base():
    cfg = tiny_experiment(objective=grpo(kl_coef=0.1))
    cfg.trainer.reference = WithoutAdapters.Config()
    with pytest.raises(
        ConfigError, match=r"trainer\.reference: expected a policy of LoRA .*; the policy has no adapters"
    ):
        cfg.check("inprocess")
    low_rank(cfg)
    cfg.check("inprocess")
    cfg.learner.groups = ()
    with pytest.raises(ConfigError, match=r"trainer\.reference: expected a policy of LoRA .*; .* is trained too"):
        cfg.check("inprocess")


# ---- in the trainer


def three_updates(path: Path, reference: Any, adapters: bool = False) -> Roles:
    cfg = config(objective=grpo(kl_coef=0.5), sampler=tiny_experiment().sampler)
    cfg.trainer.set(reference=reference)
    cfg.trainer.checkpoint.set(save_every=1, keep=3)
    if adapters:
        low_rank(cfg)
    roles = Roles.make(path, cfg)
    for _ in range(3):
        roles.submit(rewards=[1.0, 0.0, 0.0, 0.5], lengths=[4, 6, 2, 5])
        assert roles.trainer.run_once()
        roles.trainer.settle()
    roles.trainer.close()
    return roles


@pytest.mark.full
def test_the_term_grows_from_zero_and_a_checkpoint_links_the_copy(tmp_path: Path):
    roles = three_updates(tmp_path / "r", FrozenCopy.Config())
    found = [row["kl_reference"] for row in roles.rows()]
    assert found[0] < 1e-8 < 1e-5 < found[1] < found[2]
    steps = [roles.run.checkpoints / "rl" / str(step) for step in (1, 2, 3)]
    files = [{os.stat(file).st_ino for file in (step / "constant" / "d").iterdir()} for step in steps]
    assert files[0] and files[0] == files[1] == files[2]
    moving = three_updates(tmp_path / "m", FrozenCopy.Config(reset_every=2))
    assert [row["kl_reference"] < 1e-8 for row in moving.rows()] == [True, False, True]


@pytest.mark.full
def test_adapters_off_are_the_frozen_copy_of_adapters_that_were_zero(tmp_path: Path):
    """The same updates to the bit: LoRA begins as the base, so version 0 and the base are one policy."""
    one = three_updates(tmp_path / "a", WithoutAdapters.Config(), adapters=True)
    other = three_updates(tmp_path / "b", FrozenCopy.Config(), adapters=True)
    assert host(one.trainer.state) == host(other.trainer.state) and one.rows() == other.rows()


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_a_penalty_in_the_reward_is_the_divergence_of_what_was_drawn(tmp_path: Path, packed: bool):
    """Zero, to rounding, while version 0 draws; then what scoring by hand says."""
    cfg = config(objective=grpo().set(reward_shaping=ReferencePenalty.Config(coef=0.5)))
    cfg.trainer.set(reference=FrozenCopy.Config())
    if packed:
        cfg.trainer.set(packing=Packing.Config(lengths=(12, 6), rows=2))
    roles = Roles.make(tmp_path / "r", cfg, initial=tiny_params(cfg.policy))  # pyright: ignore
    roles.advance(2)
    first, second = roles.rows()
    assert abs(first["divergence_mean"]) < 1e-4 < abs(second["divergence_mean"])
    assert first["update_norm"] > 0 and "kl_reference" not in first
