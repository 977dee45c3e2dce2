"""Reference policies in the policy trainer: refusals, terms that compare with them, and checkpoints."""

import os
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import ConfigError
from axlearn_like.training.alignment.reference import FrozenCopy, WithoutAdapters
from experiments.modifiers import low_rank
from rl.objective import ReferencePenalty
from rl.objective.presets import grpo, reinforce_pp
from rl.training.packing import Packing
from tests.bounds import within
from tests.rl.tiny import tiny_experiment, tiny_params
from tests.rl.training.test_trainer import Roles, config, host

pytestmark = pytest.mark.numerics


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
    assert within(found[0], 1e-8) and 1e-5 < found[1] < found[2]
    steps = [roles.run.checkpoints / "rl" / str(step) for step in (1, 2, 3)]
    files = [{os.stat(file).st_ino for file in (step / "constant" / "d").iterdir()} for step in steps]
    assert files[0] and files[0] == files[1] == files[2]
    moving = three_updates(tmp_path / "m", FrozenCopy.Config(reset_every=2))
    assert [within(row["kl_reference"], 1e-8) for row in moving.rows()] == [True, False, True]


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
    assert within(first["divergence_mean"], 1e-4) and abs(second["divergence_mean"]) > 1e-4
    assert first["update_norm"] > 0 and "kl_reference" not in first


@pytest.mark.full
def test_a_penalty_by_token_reaches_the_update(tmp_path: Path):
    """Equal rewards, which without it have no advantage, get one once the policy has left the reference."""
    cfg = config(objective=reinforce_pp(reward_kl=0.5))
    cfg.trainer.set(reference=FrozenCopy.Config())
    roles = Roles.make(tmp_path / "r", cfg, initial=tiny_params(cfg.policy))  # pyright: ignore
    roles.advance(2)
    first, second = roles.rows()
    assert within(first["divergence_mean"], 1e-4) and abs(second["divergence_mean"]) > 1e-4
    assert second["advantage_std"] == pytest.approx(1.0, abs=1e-3) and second["update_norm"] > 0
