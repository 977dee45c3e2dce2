"""The prompt pool: what is drawn again, what rests, and that a resumed run draws what an uninterrupted one does."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import ConfigError
from axlearn_like.run.metrics import read_rows
from rl.controller.prompt_pool import PromptPool
from rl.protocol.messages import Group, Score
from rl.rollout.request import draw_seed
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows
from tests.rl.controller.scripted import drain, granted, make, scored
from tests.rl.runtime.ray.experiments import assert_same_outcome, run_here, run_in_parts
from tests.rl.tasks.numbers import Numbers
from tests.rl.tiny import make_group, make_prompt, tiny_experiment

GROUPS, SAMPLES = 6, 8


def tasks() -> TaskMixture:
    families = (Numbers.Config(label="odd", weight=2.0), Numbers.Config(label="even", weight=1.0))
    return TaskMixture.Config(families=families, heldout_every=10**9).build()


def pool(staleness: int = 0, **fields: Any) -> PromptPool:
    cfg = PromptPool.Config(**{"explore": 0.25, **fields})
    return cfg.build(tasks=tasks(), groups=GROUPS, staleness=staleness).start(0)


def problems(made: PromptPool, step: int) -> list[tuple[int, int]]:
    """Return (problem's id, draw) of a step."""
    found = [made.problem(step, place) for place in range(GROUPS)]
    return [(problem.id, draw) for problem, draw in found]


def results(made: PromptPool, step: int, rates: Any) -> list[Group]:
    """Return groups of which `rates(problem's id)` of the answers are right."""
    groups = []
    for problem, _ in problems(made, step):
        right = round(rates(problem) * SAMPLES)
        groups.append(make_group(make_prompt(problem), [[1]] * SAMPLES, [1.0] * right + [0.0] * (SAMPLES - right)))
    return groups


def go_on(made: PromptPool, steps: int, rates: Any) -> tuple[PromptPool, Counter[int], list[tuple[int, int]]]:
    """Return the pool after so many steps, how often each problem was drawn, and all draws in order."""
    times, draws = Counter[int](), []
    first = made.state()["step"]
    for step in range(first, first + steps):
        draws += problems(made, step)
        made = made.after(results(made, step, rates))
    times.update(problem for problem, _ in draws)
    return made, times, draws


def test_problems_solved_half_of_the_time_are_drawn_again_and_the_others_are_not():
    rates = {0: 0.0, 1: 0.5, 2: 1.0}  # by the number of the problem modulo 3
    made, times, draws = go_on(pool(), 40, lambda problem: rates[problem // 2 % 3])
    by_rate = {rate: np.mean([n for p, n in times.items() if rates[p // 2 % 3] == rate]) for rate in rates.values()}
    assert by_rate[0.5] > 2 * by_rate[0.0] and by_rate[0.5] > 2 * by_rate[1.0] and by_rate[1.0] == 1.0
    again = sum(draw > 0 for _, draw in draws) / len(draws)
    assert 0.5 < again <= 0.75 + 0.1  # a quarter is new
    assert len(set(draws)) == len(draws), "no problem has the keys of an earlier draw"
    for step in range(40):
        batch = [problem for problem, _ in draws[step * GROUPS : (step + 1) * GROUPS]]
        assert len(set(batch)) == GROUPS
        assert Counter(problem % 2 for problem in batch) == {0: 4, 1: 2}, "the mixture's weights hold"
    figures = made.figures()
    assert figures["pool/retired"] > 0 and figures["pool/quarantined"] > 0 and figures["pool/open"] > 0


def test_what_rests_comes_back():
    rates = lambda problem: 1.0 if problem < 25 else 0.5  # noqa: E731
    made, _, draws = go_on(pool(rest=5, explore=0.0, width=1.0), 1, rates)
    first = {problem for problem, _ in draws}
    _, _, soon = go_on(made, 5, rates)
    assert not first & {problem for problem, _ in soon}
    _, _, later = go_on(made, 30, rates)
    assert first & {problem for problem, _ in later}


def table() -> TaskMixture:
    """Twelve rows."""
    families = (TaskRows.Config(rows=RowFunction.Config(function=rows)),)
    return TaskMixture.Config(families=families, heldout_every=10**9).build()


def rows() -> Iterator[dict[str, Any]]:
    yield from ({"prompt": f"row {number}", "answer": str(number)} for number in range(12))


def test_a_row_that_rests_is_left_out_of_the_next_epochs():
    """No-positive-resampling: of rows in epochs, those that were solved once never come again; unless all are."""
    cfg, tasks = PromptPool.Config(explore=1.0, rest=10**9, quarantine_after=10**9), table()
    solved = lambda problem: tasks.canonical(problem) % 3 == 0  # noqa: E731
    made, times, draws = go_on(cfg.build(tasks=tasks, groups=GROUPS, staleness=0).start(0), 14, solved)
    counts = Counter(tasks.canonical(problem) for problem in times.elements())
    assert [counts[row] for row in range(0, 12, 3)] == [1, 1, 1, 1]
    assert [counts[row] for row in range(12) if row % 3] == [10] * 8, "14 * 6 - 4 draws of eight rows"
    assert len(set(draws)) == len(draws) and made.figures()["pool/again_fraction"] == 0
    _, _, draws = go_on(cfg.build(tasks=tasks, groups=GROUPS, staleness=0).start(0), 4, lambda problem: True)
    assert Counter(tasks.canonical(problem) for problem, _ in draws) == dict.fromkeys(range(12), 2)


def test_an_answer_that_could_not_be_scored_says_nothing():
    made = pool()
    failed = (Score(0.0, status="timeout"),) * SAMPLES
    groups = [Group(one.prompt, one.rollouts, failed) for one in results(made, 0, lambda _: 0.0)]
    figures = made.after(groups).figures()
    assert figures["pool/quarantined"] == figures["pool/retired"] == 0 and figures["pool/open"] == GROUPS


def test_only_so_many_results_are_kept():
    made, _, _ = go_on(pool(size=9, explore=1.0), 12, lambda problem: problem % 5 / 4)
    figures = made.figures()
    assert figures["pool/open"] == figures["pool/retired"] + figures["pool/quarantined"] == 9


@settings(deadline=None, max_examples=25)
@given(staleness=st.integers(0, 2), cut=st.integers(0, 6), seed=st.integers(0, 99))
def test_a_plan_depends_on_results_alone(staleness: int, cut: int, seed: int):
    """A pool that is saved as JSON and read again goes on as the one that was not; other results give another plan."""
    rates = lambda problem: (problem * 7 + seed) % 9 / 8  # noqa: E731
    whole, _, draws = go_on(pool(staleness), 12, rates)
    before, _, some = go_on(pool(staleness), cut, rates)
    saved = json.loads(json.dumps(before.state()))
    resumed, _, rest = go_on(pool(staleness).start(cut, saved), 12 - cut, rates)
    assert some + rest == draws and resumed.state() == whole.state()


def test_without_a_state_a_later_start_takes_new_problems_only():
    taken = {problem for step in range(3) for problem, _ in problems(pool(2), step)}
    later = pool().start(3)
    assert not taken & {problem for problem, _ in problems(later, 3)}
    assert {draw for _, draw in problems(later, 3)} == {0}


def test_each_draw_has_other_keys():
    assert draw_seed(5, 0) == 5
    assert len({draw_seed(seed, draw) for seed in (0, 5) for draw in range(50)}) == 100
    assert all(0 <= draw_seed(5, draw) < 2**32 for draw in range(50))


def test_bad_rules_are_refused():
    with pytest.raises(ConfigError, match=r"PromptPool.explore: expected 0 to 1, got 1.5"):
        pool(explore=1.5)
    with pytest.raises(ConfigError, match=r"Controller.pool: expected None, or tasks that are a TaskMixture"):
        make(tasks=Numbers.Config(), pool=PromptPool.Config())


def test_the_controller_leases_what_the_pool_plans_and_goes_on_from_its_state():
    fields: dict[str, Any] = {"tasks": tasks_config(), "pool": PromptPool.Config(explore=0.0), "staleness": 1}
    controller = make(**fields)
    controller.begin(0, 0)
    states: list[Any] = []

    def update(step: int) -> list[tuple[int, int]]:
        leases = drain(controller)
        for lease in leases:
            assert controller.submit(lease.id, scored(lease))
        assert controller.next_batch(step) is not None
        states.append(json.loads(json.dumps(controller.plan_after(step)))["pool"])
        controller.consumed(step)
        controller.published(step + 1)
        return [(prompt.id, prompt.draw) for lease in leases for prompt in lease.prompts]

    drawn = [update(step) for step in range(4)]
    assert any(draw for _, draw in drawn[2] + drawn[3])
    other = make(**fields)
    assert other.plan_after(0) is None  # it has no batch
    other.begin(2, 1, pool=states[1])
    again = [(prompt.id, prompt.draw) for lease in (granted(other), granted(other)) for prompt in lease.prompts]
    assert again == [one for batch in drawn for one in batch][8:12]
    assert make(tasks=tasks_config()).plan_after(0) == {}


def tasks_config() -> TaskMixture.Config:
    return TaskMixture.Config(families=(Numbers.Config(label="numbers"),), heldout_every=10**9)


@pytest.mark.full
def test_a_run_with_a_pool_that_is_stopped_and_resumed_equals_an_uninterrupted_one(tmp_path: Path):
    cfg = tiny_experiment(staleness=1, num_steps=6, evaluation=None)
    cfg.controller.pool = PromptPool.Config(explore=0.25, width=1.0, correct_threshold=0.5, retire_at=1.0)
    parts = run_in_parts(tmp_path / "parts", cfg, stop_after=3)
    assert_same_outcome(parts, run_here(tmp_path / "whole", cfg))
    rows = [row for row in read_rows(tmp_path / "whole" / "metrics.jsonl") if row["phase"] == "rl"]
    assert sum(row.get("pool/again_fraction", 0.0) for row in rows) > 0


def test_with_the_same_noise_problems_come_again_with_their_first_keys_and_last_rollouts():
    """Each draw of a problem has draw 0, and the tokens that it had the time before; without, other keys and none."""
    for same in (True, False):
        controller = make(tasks=tasks_config(), pool=PromptPool.Config(explore=0.0, same_noise=same))
        controller.begin(0, 0)
        known, draws = dict[int, list[int]](), list[int]()
        for step in range(4):
            for lease in drain(controller):
                for index, prompt in enumerate(lease.prompts):
                    earlier = [one.tolist() for one in lease.earlier[index]] if lease.earlier else []
                    assert earlier == ([known[prompt.id]] * lease.samples if same and prompt.id in known else [])
                    draws += [prompt.draw] if prompt.id in known else []
                    known[prompt.id] = [step, prompt.id % 50]
                half = [n % 2 == 0 for n in range(lease.samples)]
                groups = [make_group(one, [known[one.id]] * lease.samples, half, version=0) for one in lease.prompts]
                assert controller.submit(lease.id, tuple(groups))
            assert controller.next_batch(step) is not None
            controller.consumed(step)
            controller.published(step + 1)
        assert len(draws) > 3 and all(draw == 0 for draw in draws) is same
