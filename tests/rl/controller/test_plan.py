"""Groups that are drawn for those without a gradient: how many, which, and that any order gives the same batch."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import ConfigError
from axlearn_like.run.metrics import read_rows
from rl.controller.controller import Controller
from rl.protocol.messages import Group, Lease, Score
from rl.tasks.mixture import TaskMixture
from tests.rl.controller.scripted import drain, make
from tests.rl.runtime.ray.experiments import assert_same_outcome, run_here, run_in_parts
from tests.rl.tasks.numbers import Numbers
from tests.rl.tiny import make_group, tiny_experiment


def sampling(**changes: Any) -> Controller:
    tasks = TaskMixture.Config(families=(Numbers.Config(label="numbers"),), heldout_every=10**9)
    controller = make(tasks=tasks, **{"oversample": 2.0, "groups_per_lease": 1, **changes})
    controller.begin(0, 0)
    return controller


def answered(lease: Lease, dead: set[int]) -> tuple[Group, ...]:
    """Return scored groups; of prompts in `dead`, all rewards are equal."""
    return tuple(
        make_group(p, [[1, 2]] * 2, [1.0, 1.0] if p.id in dead else [0.0, 1.0], version=0) for p in lease.prompts
    )


def rounds(controller: Controller, dead: set[int], order: tuple[int, ...] | None = None) -> list[list[int]]:
    """Return the prompts of each round of leases of step 0; they are answered in an order of their own."""
    found: list[list[int]] = []
    while leases := drain(controller):
        found.append([prompt.id for lease in leases for prompt in lease.prompts])
        for place in order or range(len(leases)):
            if place < len(leases):
                assert controller.next_batch(0) is None
                assert controller.submit(leases[place].id, answered(leases[place], dead))
    return found


def batch(controller: Controller) -> list[int]:
    groups = controller.next_batch(0)
    assert groups is not None
    return [group.prompt.id for group in groups]


def test_groups_without_a_gradient_are_replaced_and_not_used():
    controller = sampling()
    drawn = rounds(controller, dead={0, 8, 16})  # problems are 0, 4, 8, ...
    assert drawn == [[0, 4, 8, 12], [16, 20], [24]]
    assert batch(controller) == [4, 12, 20, 24]
    drawn_reward = 4 * 0.5 / 7 + 3 / 7  # of all seven groups; that of the update's is 0.5
    figures = {"replaced_groups": 3.0, "reward_drawn": pytest.approx(drawn_reward), "tokens_drawn": 28.0}
    assert controller.plan_after(0) == {"figures": figures}
    contents = controller.contents(0, {0: (0,), 3: (1,)})
    assert contents is not None and sorted(contents) == [0, 3]
    controller.consumed(0)
    controller.published(1)
    assert [p.id for lease in drain(controller) for p in lease.prompts] == [32, 36, 40, 44], "steps do not overlap"


def test_in_whatever_order_they_come_the_batch_is_the_same():
    for order in itertools.permutations(range(4)):
        controller = sampling()
        assert rounds(controller, {4, 12}, order) == [[0, 4, 8, 12], [16, 20]]
        assert batch(controller) == [0, 8, 16, 20]


def test_at_the_limit_the_batch_is_filled_up_with_what_there_is():
    controller = sampling(oversample=1.5)
    assert rounds(controller, dead=set(range(100)) - {20}) == [[0, 4, 8, 12], [16, 20]]
    assert batch(controller) == [0, 4, 8, 20]


def test_a_lease_holds_several_and_they_come_whole():
    controller = sampling(groups_per_lease=2)
    assert rounds(controller, dead={0}) == [[0, 4, 8, 12], [16, 20]]
    assert batch(controller) == [4, 8, 12, 16]


def test_what_could_not_be_scored_is_replaced_too():
    controller = sampling()
    leases = drain(controller)
    for lease in leases:
        groups = answered(lease, set())
        failed = (Score(0.0, status="crash"), Score(1.0))
        groups = tuple(Group(g.prompt, g.rollouts, failed) if g.prompt.id == 8 else g for g in groups)
        assert controller.submit(lease.id, groups)
    assert [p.id for lease in drain(controller) for p in lease.prompts] == [16]


def test_a_lost_replacement_is_drawn_again():
    controller = sampling()
    for lease in drain(controller):
        controller.submit(lease.id, answered(lease, {4}))
    lost = drain(controller, "w")
    assert controller.missing(0).startswith("work item 4 (leased by w")
    controller.release("w", "died")
    (again,) = drain(controller, "v")
    assert [p.id for p in again.prompts] == [p.id for p in lost[0].prompts] == [16]


def test_with_one_sample_there_is_nothing_to_compare():
    with pytest.raises(ConfigError, match=r"Controller.oversample: expected 1 with one sample of each prompt"):
        make(samples_per_prompt=1, oversample=2.0)


@pytest.mark.full
def test_a_run_that_is_stopped_and_resumed_equals_an_uninterrupted_one(tmp_path: Path):
    cfg = tiny_experiment(staleness=1, evaluation=None, samples_per_prompt=2)
    cfg.controller.set(oversample=2.0)
    parts = run_in_parts(tmp_path / "parts", cfg, stop_after=3)
    assert_same_outcome(parts, run_here(tmp_path / "whole", cfg))
    rows = [row for row in read_rows(tmp_path / "whole" / "metrics.jsonl") if row["phase"] == "rl"]
    assert all(row["replaced_groups"] >= 0 for row in rows)
