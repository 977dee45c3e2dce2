"""A curriculum of families: shares by pass rates, promotion, retirement and return, and what a resumed run draws."""

import json
from collections import Counter
from typing import Any

import pytest

from axlearn_like.config import ConfigError
from rl.controller.curriculum import Curriculum, FamilyRecord
from rl.controller.prompt_pool import PromptPool
from rl.protocol.messages import Group
from rl.tasks.mixture import TaskMixture
from tests.rl.tasks.numbers import Numbers
from tests.rl.tiny import make_group, make_prompt

LABELS, GROUPS, SAMPLES = ("easy", "middle", "hard"), 8, 8


def pool(weights: tuple[float, ...] = (1.0, 1.0, 1.0), staleness: int = 1, **rules: Any) -> PromptPool:
    families = tuple(Numbers.Config(label=label, weight=one) for label, one in zip(LABELS, weights, strict=True))
    tasks = TaskMixture.Config(families=families, heldout_every=10**9).build()
    cfg = PromptPool.Config(curriculum=Curriculum.Config(**rules), explore=0.5)
    return cfg.build(tasks=tasks, groups=GROUPS, staleness=staleness).start(0)


def go_on(made: PromptPool, steps: int, rates: dict[str, float]) -> tuple[PromptPool, Counter[str], list[int]]:
    """Return the pool after so many steps in which families are solved at these rates, and what was drawn."""
    drawn: list[int] = []
    for step in range(first := made.state()["step"], first + steps):
        groups: list[Group] = []
        for place in range(GROUPS):
            problem, _ = made.problem(step, place)
            drawn.append(problem.id)
            right = round(rates[problem.family] * SAMPLES)
            answers = [1.0] * right + [0.0] * (SAMPLES - right)
            groups.append(make_group(make_prompt(problem.id), [[1]] * SAMPLES, answers))
        made = made.after(groups)
    return made, Counter(LABELS[problem % 3] for problem in drawn), drawn


def test_families_near_the_target_are_drawn_most():
    made, _, _ = go_on(pool(), 20, {"easy": 0.875, "middle": 0.5, "hard": 0.125})
    _, times, _ = go_on(made, 20, {"easy": 0.875, "middle": 0.5, "hard": 0.125})
    assert times["middle"] > 2.5 * max(times["easy"], times["hard"]) and min(times.values()) > 10
    figures = made.figures()
    assert sum(figures[f"pool/share/{label}"] for label in LABELS) == pytest.approx(1.0)


def test_before_anything_is_known_the_weights_of_the_mixture_hold():
    _, times, _ = go_on(pool((3.0, 1.0, 0.0), staleness=0, answers=10**6), 20, dict.fromkeys(LABELS, 0.5))
    assert times == {"easy": 120, "middle": 40}


def test_a_family_is_promoted_when_all_open_ones_are_solved_and_retired_when_nearly_all_is():
    rates = {"easy": 0.5, "middle": 0.5, "hard": 0.5}
    made, times, _ = go_on(pool(open=1), 10, rates)
    assert times == {"easy": 80}
    made, times, _ = go_on(made, 20, {**rates, "easy": 1.0})
    assert times["middle"] > 0 and not times["hard"]
    made, _, _ = go_on(made, 30, {**rates, "easy": 1.0})
    made, times, _ = go_on(made, 10, {**rates, "easy": 1.0})
    assert times["easy"] < 0.2 * times["middle"], "retired to a tenth of what it would have"
    made, times, _ = go_on(made, 60, {**rates, "easy": 0.5})
    _, times, _ = go_on(made, 10, rates)
    assert times["easy"] == pytest.approx(times["middle"], abs=8), "and back, since it was forgotten"


def test_a_pool_that_is_saved_and_read_again_goes_on_as_the_one_that_was_not():
    rates = {"easy": 0.875, "middle": 0.5, "hard": 0.25}
    whole, _, drawn = go_on(pool(open=2, promote_at=0.4), 14, rates)
    before, _, some = go_on(pool(open=2, promote_at=0.4), 6, rates)
    resumed = pool(open=2, promote_at=0.4).start(6, json.loads(json.dumps(before.state())))
    resumed, _, rest = go_on(resumed, 8, rates)
    assert some + rest == drawn and resumed.state() == whole.state()
    assert {problem % 3 for problem in drawn} == {0, 1, 2}


def test_as_many_are_drawn_again_as_new_ones_lack_a_gradient():
    def again(rate: float) -> float:
        tasks = TaskMixture.Config(families=(Numbers.Config(label="easy"),), heldout_every=10**9).build()
        cfg = PromptPool.Config(explore=0.25, again_per_dead=1.0, width=1.0, retire_at=1.0, quarantine_after=10**9)
        made, draws = cfg.build(tasks=tasks, groups=GROUPS, staleness=0).start(0), 0
        for step in range(60):
            drawn = [made.problem(step, place) for place in range(GROUPS)]
            draws += sum(draw > 0 for _, draw in drawn) * (step >= 30)
            dead = lambda number: number % 100 < 100 * rate  # noqa: E731
            right = [0 if dead(one.id // 16) else 4 for one, _ in drawn]
            groups = [
                make_group(make_prompt(one.id), [[1]] * SAMPLES, [1.0] * n + [0.0] * (SAMPLES - n))
                for (one, _), n in zip(drawn, right, strict=True)
            ]
            made = made.after(groups)
        return draws / (30 * GROUPS)

    assert again(0.0) < 0.1
    assert again(1.0) == pytest.approx(0.75, abs=0.08)


def test_records_and_bad_rules():
    record = FamilyRecord().after(8, 4, 0.5).after(8, 8, 0.5)
    assert (record.answers, record.solved, record.groups, record.dead) == (12.0, 10.0, 1.5, 1.0)
    with pytest.raises(ConfigError, match=r"PromptPool.curriculum.retire_at: expected more than target=0.5, got 0.4"):
        pool(retire_at=0.4)
