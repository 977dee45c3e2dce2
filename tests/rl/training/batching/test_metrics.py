"""Metrics of a batch are of all its rollouts, those that are not learned from included."""

import dataclasses

import pytest

from rl.objective import Objective
from rl.protocol.headers import header_of
from rl.protocol.messages import Group, Score
from rl.training.batching.metrics import batch_metrics
from tests.rl.tiny import make_prompt, make_rollout
from tests.rl.training.batching.made import GROUPS, MAX_NEW, MAX_PROMPT, played
from tests.rl.training.whole_groups import pack_groups


@pytest.mark.numerics
def test_figures_count_the_whole_batch_dropped_groups_included():
    timed_out = dataclasses.replace(GROUPS[0], scores=(Score(1.0), Score(0.0, "timeout")))
    cut = make_rollout(GROUPS[1].prompt, 0, [1, 2, 3, 4, 5], stopped=False)
    second = dataclasses.replace(GROUPS[1], rollouts=(cut, GROUPS[1].rollouts[1]))
    objective = Objective.Config(old_policy="current", zero_variance="drop").build()
    _, figures = pack_groups(
        [timed_out, second, GROUPS[2]], objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW
    )
    assert figures["reward"] == pytest.approx((1 + 0 + 0 + 0.5 + 1) / 5)  # of what could be scored
    assert figures["reward/even"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert figures["reward/odd"] == 0.0
    assert figures["gen_tokens"] == 3 + 5 + 5 + 5 + 1 + 4
    assert figures["completion_length"] == pytest.approx(23 / 6)
    assert figures["verifier_failures"] == 1
    assert figures["truncation_fraction"] == pytest.approx(1 / 5)  # of the rollouts that were scored
    assert all(isinstance(value, float) for value in figures.values())


def test_lengths_are_by_outcome_and_the_threshold_is_stated():
    """Truncated counts apart whatever its reward; what ended and could not be scored is in none of them."""
    prompt = make_prompt(1)
    lengths, rewards = (1, 2, 3, 4, 5), (1.0, 0.5, 0.25, 1.0, 0.0)
    rollouts = [make_rollout(prompt, n, range(length), stopped=n != 3) for n, length in enumerate(lengths)]
    scores = tuple(Score(reward, "timeout" if n == 4 else "ok") for n, reward in enumerate(rewards))
    headers = [header_of(Group(prompt, tuple(rollouts), scores))]

    def by_outcome(correct_threshold: float) -> dict[str, float]:
        found = batch_metrics(headers, correct_threshold)
        return {name.partition("/")[2]: value for name, value in found.items() if name.startswith("completion_length/")}

    assert by_outcome(1.0) == {"right": 1.0, "wrong": 2.5, "truncated": 4.0}
    assert by_outcome(0.5) == {"right": 1.5, "wrong": 3.0, "truncated": 4.0}
    assert by_outcome(0.0) == {"right": 2.0, "truncated": 4.0}


def test_figures_of_episodes_are_means_of_those_that_there_are():
    objective = Objective.Config(old_policy="current").build()
    _, figures = pack_groups([played(), GROUPS[1]], objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    named = {name: value for name, value in figures.items() if name.startswith(("episode/", "time/"))}
    assert named == {
        "episode/turns": 2.0,
        "episode/turn_rewards": 1.0,
        "episode/truncated": 0.5,
        "episode/failures": 0.0,
        "episode/tool_calls": 1.5,
        "time/tool_seconds": 0.3,
    }
    assert not any(
        name.startswith("episode/")
        for name in pack_groups([GROUPS[1]], objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)[1]
    )
