"""Unfinished rollouts that a worker hands back, and who continues them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from rl.protocol.messages import Lease, Rollout
from tests.rl.controller.scripted import (
    assert_same_prompts,
    drain,
    granted,
    make,
    scored,
)
from tests.rl.tiny import make_rollout


def drawn(lease: Lease, lengths: list[int], version: int | None = None) -> tuple[Rollout, ...]:
    """Return rollouts of a lease, truncated to these lengths; the first is complete."""
    found = []
    for prompt in lease.prompts:
        for sample, length in enumerate(lengths):
            rollout = make_rollout(prompt, sample, range(length), version=lease.version if version is None else version)
            found.append(rollout if sample == 0 else dataclasses.replace(rollout, finish_reason="abort"))
    return tuple(found)


def plain(rollouts: tuple[Rollout, ...]) -> list[Any]:
    return [(r.prompt_id, r.sample_id, list(r.tokens), list(r.versions), r.finish_reason) for r in rollouts]


def test_what_is_handed_back_goes_with_the_next_lease_of_its_work_item_and_stays_if_that_is_lost(tmp_path: Path):
    events = EventLog(tmp_path / "events.jsonl")
    controller = make(events=events)
    controller.begin(0, 0)
    lease, other = granted(controller, "a"), granted(controller, "b")
    partial = drawn(lease, [3, 0])
    assert controller.hand_back(lease.id, partial)
    assert not controller.hand_back(lease.id, partial) and not controller.submit(lease.id, scored(lease))
    for worker in ("c", "d"):
        again = granted(controller, worker)
        assert_same_prompts(lease, again)
        assert plain(again.partial) == plain(partial) and lease.partial == other.partial == ()
        controller.release(worker, "died")
    last = granted(controller, "e")
    assert controller.hand_back(last.id, drawn(last, [3, 5]))
    assert plain(granted(controller, "f").partial) == plain(drawn(last, [3, 5]))
    rows = [row for row in read_rows(events.path) if row["event"] == "handed_back"]
    assert [(row["worker"], row["lease"], row["tokens"]) for row in rows] == [("a", lease.id, 6), ("e", last.id, 16)]


def test_a_prompt_with_some_samples_missing_is_not_continued():
    controller = make()
    controller.begin(0, 0)
    lease = granted(controller)
    partial = drawn(lease, [3, 2])
    assert controller.hand_back(lease.id, partial[:3])
    assert plain(granted(controller).partial) == plain(partial[:2])


@pytest.mark.parametrize("weights", ["pinned", "newest", "in_flight"])
def test_tokens_handed_back_keep_the_age_bound(weights: str):
    controller = make(staleness=1, weights=weights)
    controller.begin(0, 0)
    leases = drain(controller)
    for lease in leases[:3]:
        controller.submit(lease.id, scored(lease))
    assert controller.next_batch(0) is not None
    controller.consumed(0)
    controller.published(1)
    late = leases[3]  # of step 1, which version 0 may draw
    assert (late.step, late.version) == (1, 0)
    assert controller.hand_back(late.id, drawn(late, [3, 2]))
    again = granted(controller)
    assert (again.step, again.version) == (1, 0 if weights == "pinned" else 1)
    assert plain(again.partial) == plain(drawn(late, [3, 2]))  # tokens keep their version: their age at step 1 is 1
    for version in (-1, 2):  # too old, and of an incarnation of the trainer that is forgotten
        assert controller.hand_back(again.id, drawn(again, [3, 2], version))
        again = granted(controller)
        assert again.partial == ()


def test_under_pinned_weights_only_tokens_of_the_pinned_version_are_continued():
    controller = make(staleness=2)
    controller.begin(2, 0)
    lease = granted(controller)
    assert lease.version == 0
    assert controller.hand_back(lease.id, drawn(lease, [3, 2], version=1))
    assert granted(controller).partial == ()


def test_a_trainer_that_begins_again_forgets_what_was_handed_back():
    controller = make()
    controller.begin(0, 0)
    lease = granted(controller)
    assert controller.hand_back(lease.id, drawn(lease, [3, 2]))
    controller.begin(0, 0)
    assert granted(controller).partial == ()
