"""The demo's constants are what the code that they stand for computes, and its sizes fit its tasks."""

import pytest

from axlearn_like.config import get_path
from experiments.demo.config import demo
from experiments.tasks.small import SUPERVISED_START


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_every_seed_fits_and_held_out_questions_are_apart(seed):
    demo(seed=seed).check()


def test_rl_and_supervision_use_other_problems():
    cfg = demo()
    assert cfg.num_steps * cfg.prompts_per_step < SUPERVISED_START
    assert cfg.warm_start is not None
    assert get_path(cfg.warm_start, "input.source.start") == SUPERVISED_START
