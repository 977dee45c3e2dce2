"""Evaluations as leases: complete before training begins and after it ends, whichever worker does what, and once."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from rl.controller.controller import Controller
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.protocol.messages import Group, Lease, Problem
from tests.rl.controller.scripted import Clock
from tests.rl.tiny import make_group, tiny_experiment, tiny_run

CFG = tiny_experiment()  # 3 held-out problems of 2 families, leased in twos; 4 updates of 2 leases


@functools.cache
def experiment(**fields: Any) -> RLExperiment:
    return tiny_experiment(**fields).build()


@functools.cache
def problems() -> list[Problem]:
    return CFG.tasks.build().heldout(3)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return tiny_run(tmp_path, CFG)


def make(run: RunDirectory, clock: Callable[[], float] | None = None) -> Controller:
    made = experiment().make_controller(run)
    made._clock = clock or Clock()
    return made


def answered(lease: Lease) -> tuple[Group, ...]:
    """Scored answers that depend on the problem alone: 0 to 4 of 4 samples are right, "A"; the others are "B"."""
    right = {p.id: [i < p.id % 5 for i in range(lease.samples)] for p in lease.prompts}
    return tuple(
        make_group(p, [[65 if one else 66, 257] for one in right[p.id]], right[p.id], version=0) for p in lease.prompts
    )


def drain(controller: Controller, worker: str = "w") -> list[Lease]:
    return list(iter(lambda: controller.lease(worker), None))


def finish(controller: Controller, leases: list[Lease]) -> list[bool]:
    return [controller.generated(lease.id) and controller.submit(lease.id, answered(lease)) for lease in leases]


def result(run: RunDirectory, when: str) -> dict[str, Any]:
    return json.loads((run.path / f"eval_{when}.json").read_text())


def train_to(controller: Controller, step: int, start: int = 0) -> None:
    """Make the updates up to this one, by hand."""
    for s in range(start, step):
        assert all(finish(controller, [lease for lease in drain(controller) if lease.step == s]))
        assert controller.next_batch(s) is not None
        controller.consumed(s)
        controller.published(s + 1)


def test_training_waits_until_version_0_is_evaluated_and_the_last_version_comes_at_the_end(run: RunDirectory):
    controller = make(run)
    assert drain(controller) == [] and controller.status()["evaluating"] is None  # the trainer has not begun
    controller.begin(0, 0)
    leases = drain(controller)
    assert [(one.evaluation, one.version, one.samples) for one in leases] == [(True, 0, 4)] * 3
    assert [p.id for one in leases for p in one.prompts] == [p.id for p in problems()]
    assert all(finish(controller, leases[:2])) and drain(controller) == []
    assert controller.status()["evaluating"] == 0 and not (run.path / "eval_before.json").exists()
    assert all(finish(controller, leases[2:]))
    assert controller.status()["evaluating"] is None
    train_to(controller, 4)
    last = drain(controller)
    assert [(one.evaluation, one.version) for one in last] == [(True, 4)] * 3
    assert controller.status()["evaluating"] == 4
    assert all(finish(controller, last))
    assert controller.status()["evaluating"] is None and drain(controller) == []
    assert (result(run, "before")["step"], result(run, "after")["step"]) == (0, 4)
    groups = [group for one in leases for group in answered(one)]
    assert isinstance(CFG.evaluation, Evaluation.Config)
    votes = [["AB"[score.reward < 1] for score in group.scores] for group in groups]
    summary, rows = CFG.evaluation.build().summarise(problems(), groups, votes, experiment().tokenizer, CFG.seed)
    assert result(run, "before") == {"step": 0, **summary}
    wins = {0: 0.0, 1: 0.0, 2: 0.5, 3: 1.0, 4: 1.0}  # by right samples of 4: a tie is half of a majority
    for name, row in summary["families"].items():
        expected = [wins[problem.id % 5] for problem in problems() if problem.family == name]
        assert row["maj@4"] == pytest.approx(sum(expected) / len(expected)) and "maj@1" not in row
    found = controller.evaluation(0)
    assert found is not None and found["evaluation/maj@4"] == summary["maj@4"]
    shown = [json.loads(line) for line in (run.rollouts / "eval_before.jsonl").read_text().splitlines()]
    assert shown == [{"phase": "eval_before", "step": 0, **row} for row in rows] and len(shown) == 2


def test_what_a_dead_or_slow_worker_had_goes_to_another_and_the_figures_are_the_same(run: RunDirectory):
    clock = Clock()
    controller = make(run, clock)
    controller.begin(0, 0)
    dead, slow = controller.lease("dead"), controller.lease("slow")
    assert dead is not None and slow is not None
    assert controller.release("dead", "worker died") == 1
    clock.now += 1000.0
    others = drain(controller)
    assert sorted(p.id for one in others for p in one.prompts) == sorted(p.id for p in problems())
    assert finish(controller, [dead, slow]) == [False, False]
    assert all(finish(controller, others[::-1]))
    disturbed = result(run, "before")
    (run.path / "eval_before.json").unlink()
    calm = make(run)
    calm.begin(0, 0)
    assert all(finish(calm, drain(calm)))
    assert result(run, "before") == disturbed


def test_a_restarted_controller_or_trainer_repeats_only_the_evaluation_in_hand(run: RunDirectory):
    controller = make(run)
    controller.begin(0, 0)
    stale = drain(controller)
    assert finish(controller, stale[:1]) == [True]
    controller.begin(0, 0)  # another trainer: its weights of version 0 may be others
    assert finish(controller, stale[1:]) == [False, False]
    assert all(finish(controller, drain(controller)))
    again = make(run)
    again.begin(0, 0)
    assert not any(lease.evaluation for lease in drain(again))
    again.begin(4, 4)
    assert again.status()["evaluating"] == 4
    assert all(finish(again, drain(again)))
    third = make(run)
    third.begin(4, 4)
    assert drain(third) == [] and third.status()["evaluating"] is None
    third.begin(6, 6)  # the run was longer before it was shortened: its last version is that of the checkpoint
    assert third.status()["evaluating"] == 6


def test_half_an_answer_that_is_handed_back_is_continued(run: RunDirectory):
    controller = make(run)
    controller.begin(0, 0)
    lease = controller.lease("leaving")
    assert lease is not None
    partial = tuple(rollout for group in answered(lease) for rollout in group.rollouts)
    assert controller.hand_back(lease.id, partial)
    again = controller.lease("next")
    assert again is not None and again.id != lease.id
    assert [p.id for p in again.prompts] == [p.id for p in lease.prompts]
    assert [(r.prompt_id, r.sample_id) for r in again.partial] == [(r.prompt_id, r.sample_id) for r in partial]


# ---- during training


def periodic(run: RunDirectory, step: int = 0, held: int | None = None, earlier_tokens: int = 0) -> Controller:
    cfg = tiny_experiment(num_steps=6, evaluate_every=2)
    assert cfg.evaluation is not None
    cfg.evaluation.earlier_tokens = earlier_tokens
    made = cfg.build().make_controller(run)
    made._clock = Clock()
    made.begin(step, step, held=held)
    return made


def evaluated(run: RunDirectory) -> list[int]:
    return [row["step"] for row in read_rows(run.path / "evaluations.jsonl")]


def test_versions_between_are_evaluated_while_training_goes_on_and_before_the_next_one_is_made(run: RunDirectory):
    controller = periodic(run)
    assert all(finish(controller, drain(controller, "only")[:3]))
    for s in range(2):
        leases = drain(controller, "only")
        assert [(one.evaluation, one.step) for one in leases] == [(False, s)] * 2
        assert all(finish(controller, leases)) and controller.next_batch(s) is not None
        controller.consumed(s)
        controller.published(s + 1)
    turns = [controller.lease("only") for _ in range(5)]
    assert [one and (one.evaluation, one.version) for one in turns] == [
        (True, 2),
        (False, 2),
        (True, 2),
        (False, 2),
        (True, 2),
    ]
    training = [one for one in turns if one is not None and not one.evaluation]
    assert all(finish(controller, training)) and controller.next_batch(2) is not None
    controller.consumed(2)
    controller.published(3)
    assert all(finish(controller, [one for one in drain(controller, "only") if not one.evaluation]))
    assert controller.next_batch(3) is None  # it would make version 4, and version 2 is not evaluated
    assert "the evaluation of version 2" in controller.missing(3)
    assert all(finish(controller, [one for one in turns if one is not None and one.evaluation]))
    assert controller.next_batch(3) is not None and evaluated(run) == [0, 2]


def test_of_many_workers_a_quarter_evaluates_and_keeps_to_it(run: RunDirectory):
    controller = periodic(run)
    for number in range(8):
        controller.join(f"w{number}")
    assert all(finish(controller, drain(controller)))
    train_to(controller, 2)
    granted = [controller.lease(f"w{number}") for number in range(4)]
    assert [one and one.evaluation for one in granted] == [True, True, False, False]
    again = controller.lease("w1")
    assert again is not None and again.evaluation
    assert controller.lease("w5") is None  # training has no more leases, and evaluation enough workers


def test_a_restarted_trainer_has_later_versions_evaluated_again_and_what_is_held_before_that(run: RunDirectory):
    controller = periodic(run)
    for version in (0, 2, 4):
        train_to(controller, version, max(0, version - 2))
        assert all(finish(controller, drain(controller)))
    assert evaluated(run) == [0, 2, 4]
    controller.begin(3, 3, held=2)
    assert evaluated(run) == [0, 2]  # version 4 will be made again
    assert controller.status()["evaluating"] is None
    other = periodic(run, step=5, held=4)
    assert other.status()["evaluating"] == 4
    lost = periodic(run, step=5)
    assert lost.status()["evaluating"] is None
    assert [row["version"] for row in read_rows(run.events_path) if row["event"] == "evaluation_lost"] == [4]


def test_an_evaluation_gets_the_rollouts_of_the_one_before_as_drafts(run: RunDirectory):
    controller = periodic(run, earlier_tokens=1000)
    first = drain(controller, "only")[:3]
    assert all(finish(controller, first)) and not any(one.earlier for one in first)
    train_to(controller, 2)
    again = [one for one in drain(controller, "only") if one.evaluation]
    expected = [[rollout.tokens.tolist() for rollout in group.rollouts] for one in again for group in answered(one)]
    found = [[tokens.tolist() for tokens in samples] for one in again for samples in one.earlier]
    assert len(again) == 3 and found == expected
    restarted = periodic(run, earlier_tokens=1000)  # drafts are a cache, which a controller that starts again lacks
    restarted.begin(2, 2)
    assert not any(one.earlier for one in drain(restarted, "only"))
