"""The controller: its plan of prompts, its leases, and others that die and come back."""

from pathlib import Path

import numpy as np
import pytest

from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.bytes import ByteTokenizer
from mesh import UserError
from rl.runtime.simulated.virtual_clock import VirtualClock
from rl.tasks.encoding import encode_prompt
from tests.rl.controller.scripted import (
    STEPS,
    Clock,
    assert_same_prompts,
    config,
    drain,
    granted,
    ids,
    make,
    mixture,
    scored,
)


def test_the_plan_is_the_mixture_in_order_and_nothing_else():
    controller = make(staleness=STEPS)
    controller.begin(0, 0)
    leases = drain(controller)
    problems = [mixture().train(i) for i in range(4 * STEPS)]
    prompts = [prompt for lease in leases for prompt in lease.prompts]
    assert [(p.id, p.family) for p in prompts] == [(p.id, p.family) for p in problems]
    tokenizer = ByteTokenizer.Config().build()
    for prompt, problem in zip(prompts, problems, strict=True):
        np.testing.assert_array_equal(prompt.tokens, encode_prompt(problem.question, tokenizer))
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_a_work_item_leased_again_has_equal_prompts_and_another_lease_id():
    clock = Clock()
    controller = make(clock)
    controller.begin(0, 0)
    first = granted(controller, "a")
    other = granted(controller, "b")
    clock.now += 60.0
    again = granted(controller, "c")
    assert_same_prompts(first, again)
    assert len({first.id, other.id, again.id}) == 3
    assert not controller.generated(first.id)
    assert not controller.submit(first.id, scored(first))
    assert controller.submit(again.id, scored(again))
    assert not controller.submit(again.id, scored(again))  # twice
    assert (first.rerun, other.rerun, again.rerun) == (False, False, True)
    assert_same_prompts(other, granted(controller, "c"))


def test_a_lease_lasts_until_its_deadline_and_not_longer():
    clock = Clock()
    controller = make(clock, prompts_per_step=2)
    controller.begin(0, 0)
    lease = granted(controller, "a")
    clock.now += 59.9
    assert controller.lease("b") is None
    assert controller.renew(lease.id)  # its worker is at it
    clock.now += 59.9
    assert controller.generated(lease.id)  # and has done it
    clock.now += 59.9
    assert controller.lease("b") is None
    clock.now += 0.1
    assert not controller.renew(lease.id)
    assert ids(granted(controller, "b")) == ids(lease)
    assert controller.status()["rejected"] == 0  # a question is no report


def test_a_new_controller_with_a_later_first_lease_rejects_the_reports_of_the_old_one():
    old = config().build(clock=Clock())
    old.begin(0, 0)
    stale = granted(old)
    new = config().build(clock=Clock(), first_lease=1_000_000)
    new.begin(1, 1)
    leases = drain(new)
    assert stale.id not in [lease.id for lease in leases]
    assert not new.submit(stale.id, scored(stale))
    assert not stale.rerun and all(lease.rerun for lease in leases)  # the old one may have granted them


@pytest.mark.parametrize("gone", ["join", "release"])
def test_a_call_of_a_worker_that_is_gone_is_granted_nothing(gone: str):
    """A killed worker's call may wait at the controller; the process that takes its name gets the next work."""
    clock = VirtualClock()
    controller = config(prompts_per_step=2).build(clock=clock)
    controller.begin(0, 0)
    controller.join("a")
    first, answers = granted(controller, "a"), {}
    assert controller.submit(first.id, scored(first))

    def takes_over() -> None:
        clock.sleep(1.0)
        if gone == "release":
            controller.release("a", "killed")
        else:
            controller.join("a")
        controller.consumed(0)
        controller.begin(1, 1)
        clock.sleep(1.0)
        answers["new"] = controller.lease("a")

    clock.spawn("killed", lambda: answers.update(killed=controller.lease("a", timeout=60.0)))
    clock.spawn("new", takes_over)
    clock.run()
    assert answers["killed"] is None and answers["new"] is not None


def test_a_silent_worker_loses_its_lease_to_one_that_asks_and_can_go_on(tmp_path: Path):
    """A stopped worker continues with a lease that another has: its rollouts are rejected."""
    clock, events = Clock(), EventLog(tmp_path / "events.jsonl")
    controller = make(clock, events, prompts_per_step=2)
    controller.begin(0, 0)
    for worker in ("a", "b", "c"):
        controller.join(worker)
        controller.heard(worker)
    controller.leave("c")
    controller.heard("c")  # on its way out
    lease = granted(controller, "a")
    clock.now += 2.4
    controller.heard("b")
    assert controller.lease("b") is None
    clock.now += 0.2
    assert controller.lease("b") is None, "the controller may have stood still: no worker was heard"
    controller.heard("b")
    again = granted(controller, "b")
    assert_same_prompts(lease, again)
    assert controller.status()["workers"] == ["b"]
    silent, row = read_rows(events.path)
    assert (silent["event"], silent["worker"]) == ("silent", "a")
    assert (row["lease"], row["worker"], row["reason"]) == (lease.id, "a", "worker silent")
    controller.heard("a")
    assert not controller.renew(lease.id) and not controller.submit(lease.id, scored(lease))
    assert controller.lease("a") is None and controller.status()["workers"] == ["a", "b"]
    assert controller.submit(again.id, scored(again))


def test_a_worker_without_heartbeats_is_not_watched_nor_one_that_asks_itself():
    clock = Clock()
    controller = make(clock, prompts_per_step=4)
    controller.begin(0, 0)
    first = granted(controller, "in this process")
    second = granted(controller, "slow")
    controller.heard("slow")
    clock.now += 30.0
    controller.join("b")
    controller.heard("b")
    assert controller.lease("slow") is None  # asks, so it lives
    assert controller.renew(first.id) and controller.renew(second.id)


def test_join_releases_the_leases_of_the_former_incarnation(tmp_path: Path):
    events = EventLog(tmp_path / "events.jsonl")
    controller = make(events=events)
    controller.begin(0, 0)
    lost, kept = granted(controller, "a"), granted(controller, "b")
    controller.join("a")
    assert not controller.submit(lost.id, scored(lost))
    assert_same_prompts(lost, granted(controller, "a"))
    assert controller.submit(kept.id, scored(kept))
    (row,) = read_rows(events.path)
    assert (row["event"], row["worker"], row["lease"], row["step"]) == ("lease_expired", "a", lost.id, 0)
    assert row["reason"] == "worker restarted"
    assert controller.release("nobody", "gone") == 0


def test_a_batch_is_told_of_once_when_the_trainer_gets_it_and_not_when_it_is_used():
    """The controller may be dead by then, and the one that begins after this update does not have its rollouts."""
    told: list[tuple[int, list[int]]] = []
    controller = config().build(observers=[lambda step, groups: told.append((step, [g.prompt.id for g in groups]))])
    controller.begin(0, 0)
    leases = drain(controller)
    for lease in leases:
        assert controller.submit(lease.id, scored(lease))
    first = controller.next_batch(0)
    assert first is not None and controller.next_batch(0) is not None
    assert told == [(1, [group.prompt.id for group in first])]
    controller.consumed(0)
    assert len(told) == 1


def test_begin_forgets_everything_that_was_not_consumed():
    controller = make(staleness=1)
    controller.begin(0, 0)
    leases = drain(controller)
    for lease in leases[:3]:
        controller.submit(lease.id, scored(lease))
    controller.begin(0, 0)
    assert controller.next_batch(0) is None
    assert not controller.submit(leases[3].id, scored(leases[3]))
    for lease, again in zip(leases, drain(controller), strict=True):
        assert_same_prompts(lease, again)


def test_bad_sizes_are_refused_by_name():
    with pytest.raises(UserError, match="Controller.groups_per_lease: expected a divisor of prompts_per_step=4, got 3"):
        config(groups_per_lease=3).build()
    with pytest.raises(UserError, match="Controller.staleness: expected 0 or more, got -1"):
        config(staleness=-1).build()


def test_status_names_the_registered_workers():
    controller = make()
    for worker in ("b", "a", "b"):
        controller.join(worker)
    assert controller.status()["workers"] == ["a", "b"]
    controller.begin(0, 0)
    lease = granted(controller, "a")
    controller.leave("a")
    assert controller.status()["workers"] == ["b"]
    assert_same_prompts(granted(controller, "b"), lease)
