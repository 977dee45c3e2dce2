"""Versions that the controller lets a step's rollouts have."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.protocol.messages import Lease
from tests.rl.controller.scripted import STEPS, Clock, drain, make, mixture, scored


@pytest.mark.parametrize("weights", ["pinned", "newest"])
@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_with_bound_k_step_s_is_leasable_from_version_s_minus_k_and_not_before(bound: int, weights: str):
    follow(make(staleness=bound, weights=weights), bound, weights)


@pytest.mark.parametrize("weights", ["pinned", "newest"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_bound_that_is_off_by_one_is_seen(off: int, weights: str):
    """The mutation: a controller that allows one version more, or one less, than it was asked for."""
    with pytest.raises(AssertionError):
        follow(make(staleness=2 + off, weights=weights), 2, weights)


def follow(controller: Any, bound: int, weights: str) -> None:
    """Play a scripted trainer, and compare leases and the ages of rollouts with the bound."""
    assert drain(controller) == []  # nothing is published
    controller.begin(0, 0)
    held: list[Lease] = []
    for step in range(STEPS):
        version = step
        fresh = drain(controller)
        held += fresh
        newest = min(STEPS - 1, version + bound)
        expected = range(newest + 1) if step == 0 else range(version + bound, newest + 1)
        assert [lease.step for lease in fresh] == [s for s in expected for _ in range(2)]
        for lease in fresh:
            assert lease.version == (max(0, lease.step - bound) if weights == "pinned" else version)
        for lease in [lease for lease in held if lease.step == step]:
            assert controller.submit(lease.id, scored(lease))
        batch = controller.next_batch(step)
        assert batch is not None
        ages = [step - int(r.versions.min()) for group in batch for r in group.rollouts]
        assert max(ages) <= bound
        if step >= bound:
            assert max(ages) == bound  # the bound is used, not undercut
        controller.consumed(step)
        controller.published(step + 1)
    assert drain(controller) == []
    assert controller.status()["consumed_steps"] == STEPS


@settings(deadline=None, max_examples=40)
@given(
    bound=st.integers(0, 3),
    weights=st.sampled_from(["pinned", "newest"]),
    moves=st.lists(st.sampled_from(["lease", "submit", "train", "expire", "die", "resume"]), max_size=80),
    chance=st.randoms(use_true_random=False),
)
def test_no_consumed_rollout_is_older_than_the_bound(bound: int, weights: str, moves: list[str], chance: Any):
    """The order of grants, reports, expiries, dead workers and restarts of the trainer is random."""
    clock = Clock()
    controller = make(clock, staleness=bound, weights=weights)
    controller.begin(0, 0)
    step, published, held, consumed = 0, [0], [], []
    for move in moves:
        clock.now += 1.0
        if move == "lease" and (lease := controller.lease(chance.choice("ab"))) is not None:
            assert step <= lease.step <= min(STEPS - 1, step + bound)
            assert lease.version in published and lease.step - bound <= lease.version <= step
            held.append(lease)
        elif move == "submit" and held:
            lease = held.pop(chance.randrange(len(held)))
            controller.submit(lease.id, scored(lease))
        elif move == "expire":
            clock.now += 60.0
        elif move == "die":
            controller.release("a", "died")
        elif move == "resume":
            step = chance.randint(max(0, step - 2), step)
            first = max(0, step - bound)
            published, consumed = [v for v in published if first <= v <= step], consumed[:step]
            controller.begin(step, first)
        elif move == "train" and step < STEPS and (batch := controller.next_batch(step)) is not None:
            versions = [int(v) for group in batch for r in group.rollouts for v in r.versions]
            assert step - min(versions) <= bound and max(versions) <= step
            if weights == "pinned":  # what makes asynchronous runs repeatable, resumed or not
                assert set(versions) == {max(0, step - bound)}
            assert [g.prompt.id for g in batch] == [mixture().train(step * 4 + i).id for i in range(4)]
            controller.consumed(step)
            consumed.append(step)
            step += 1
            published.append(step)
            controller.published(step)
    assert consumed == list(range(step))


def test_pinned_versions_after_a_resume_are_those_that_can_be_pulled():
    controller = make(staleness=2)
    controller.begin(5, 4)  # a trainer that restored step 5 and, of its past, version 4 only
    assert [(lease.step, lease.version) for lease in drain(controller)] == [(5, 4), (5, 4), (6, 4), (6, 4)]


def test_before_the_trainer_began_nothing_is_leased_whatever_is_published():
    controller = make(staleness=1)
    controller.published(3)  # of a trainer that does not know that this controller is a new one
    controller.consumed(2)
    assert drain(controller) == [] and controller.status()["version"] == -1
    controller.begin(3, 2)
    assert [lease.step for lease in drain(controller)] == [3, 3, 4, 4]
