"""The demo's constants are what the code that they stand for computes, and its sizes fit its tasks."""

import pytest

from axlearn_like.config import get_path
from axlearn_like.tokenizers.phrases import learn_phrases
from experiments.demo.config import demo
from experiments.demo.data import PHRASES, task_mixture
from experiments.tasks.small import SUPERVISED_START


def test_phrases_are_those_learned_from_the_training_questions():
    tasks = task_mixture(0).build()
    questions = [tasks.train(index).question for index in range(1200)]
    assert set(learn_phrases(questions, max_phrases=16)) == set(PHRASES)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_every_seed_fits_and_held_out_questions_are_apart(seed):
    demo(seed=seed).check()


def test_rl_and_supervision_use_other_problems():
    cfg = demo()
    assert cfg.num_steps * cfg.prompts_per_step < SUPERVISED_START
    assert cfg.warm_start is not None
    assert get_path(cfg.warm_start, "input.source.start") == SUPERVISED_START
