"""Rollouts kept as drafts: of each prompt the latest, so many tokens in all."""

import numpy as np

from rl.controller.memory import RolloutMemory
from tests.rl.tiny import make_group, make_prompt


def test_the_latest_are_kept_up_to_a_number_of_tokens():
    prompts = [make_prompt(number, 2) for number in range(4)]
    memory = RolloutMemory(12)
    assert memory.of(prompts) == ()
    memory.remember([make_group(one, [[number] * 3, [9]], [0.0, 1.0], version=0) for number, one in enumerate(prompts)])
    assert memory.held == 12
    assert [len(known) for known in memory.of(prompts)] == [0, 2, 2, 2], "the prompt of longest ago went first"
    memory.remember([make_group(prompts[1], [[7] * 2], [0.0], version=1)])
    found = memory.of(prompts)
    assert memory.held == 10 and [tokens.tolist() for tokens in found[1]] == [[7, 7]]
    assert np.array_equal(found[3][0], [3] * 3)
    memory.remember([make_group(prompts[0], [[5] * 40], [0.0], version=1)])
    assert memory.held == 0 and memory.of(prompts) == ()
    none = RolloutMemory(0)
    none.remember([make_group(prompts[0], [[5]], [0.0], version=1)])
    assert none.held == 0 and none.of(prompts) == ()
