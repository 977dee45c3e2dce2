"""The controller: its plan of prompts and versions and the arithmetic of staleness, with a scripted trainer."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.bytes import ByteTokenizer
from mesh import UserError
from rl.controller.controller import Controller
from rl.roles.messages import Group, Lease, Rollout
from rl.roles.timeouts import Timeouts
from rl.tasks.mixture import TaskMixture, encode_prompt
from tests.rl.tasks.numbers import Numbers
from tests.rl.tiny import make_group, make_rollout, tiny_tasks

STEPS = 7


@functools.cache
def mixture() -> TaskMixture:
    """Return the problems; not when this file is imported, since their library takes seconds to import."""
    return tiny_tasks().build()


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def config(**changes: Any) -> Controller.Config:
    cfg = Controller.Config(
        tasks=tiny_tasks(),
        tokenizer=ByteTokenizer.Config(),
        num_steps=STEPS,
        groups=4,
        samples=2,
        groups_per_lease=2,
        lease_seconds=60.0,
    )
    return cfg.set(**changes)


def make(clock: Callable[[], float] | None = None, events: EventLog | None = None, **changes: Any) -> Controller:
    return config(**changes).build(clock=clock or Clock(), events=events)


def scored(lease: Lease) -> tuple[Group, ...]:
    """Return scored groups as a worker submits them: rollouts of the version that the lease names."""
    return tuple(make_group(p, [[1, 2]] * lease.samples, [0.0, 1.0], version=lease.version) for p in lease.prompts)


def granted(controller: Controller, worker: str = "w") -> Lease:
    lease = controller.lease(worker)
    assert lease is not None
    return lease


def drain(controller: Controller, worker: str = "w") -> list[Lease]:
    """Lease all that can be leased now."""
    return list(iter(lambda: controller.lease(worker), None))


def ids(lease: Lease) -> list[int]:
    return [prompt.id for prompt in lease.prompts]


def assert_same_prompts(a: Lease, b: Lease) -> None:
    assert (ids(a), a.step, a.version, a.samples) == (ids(b), b.step, b.version, b.samples)
    for one, other in zip(a.prompts, b.prompts, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


# ---- staleness


@pytest.mark.parametrize("weights", ["pinned", "newest"])
@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_with_bound_k_step_s_is_leasable_from_version_s_minus_k_and_not_before(bound: int, weights: str):
    controller = make(staleness=bound, weights=weights)
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


# ---- the plan


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
    assert_same_prompts(other, granted(controller, "c"))


def test_a_lease_lasts_until_its_deadline_and_not_longer():
    clock = Clock()
    controller = make(clock, groups=2)
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


# ---- the death of others


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


# ---- what is handed back


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


# ---- problems that cannot be made


def numbers(**fields: Any) -> TaskMixture.Config:
    return TaskMixture.Config(families=(Numbers.Config(label="numbers", **fields),), heldout_every=10**9)


def test_problems_are_made_outside_the_lock(monkeypatch: pytest.MonkeyPatch):
    gate, asked = threading.Event(), threading.Event()
    controller = make(tasks=numbers())
    train = controller._tasks.train

    def train_slowly(index: int) -> Any:
        asked.set()
        assert gate.wait(60)
        return train(index)

    controller._tasks.train = train_slowly
    found: list[Lease | None] = []
    thread = threading.Thread(target=lambda: found.append(controller.lease("w", timeout=60.0)))
    controller.begin(0, 0)
    thread.start()
    assert asked.wait(60)
    assert controller.status()["leased"] == 0 and not controller.renew(0) and controller.next_batch(0) is None
    assert thread.is_alive()  # nobody waited for the problem but who asked for it
    monkeypatch.setattr("rl.controller.controller._PROMPTS_WAIT", 0.01)
    assert controller.lease("v") is None  # and nobody for ever
    gate.set()
    thread.join(60)
    plain = make(tasks=numbers())
    plain.begin(0, 0)
    assert found[0] is not None
    assert_same_prompts(found[0], granted(plain))


def test_a_problem_that_never_comes_is_left_out_of_every_lease():
    plain = make(tasks=numbers())
    plain.begin(0, 0)
    first, second = drain(plain)
    controller = make(tasks=numbers(endless=(ids(first)[0],)), problem_seconds=0.5)
    controller.begin(0, 0)
    lease = granted(controller)
    assert ids(lease) == [ids(first)[0] + 1, ids(first)[1]]
    assert_same_prompts(granted(controller), second)
    assert controller.status()["skipped"] == {"numbers": {"slow": 1}}
    for one in (lease, second):
        assert controller.submit(one.id, scored(one))
    assert controller.consumed(0) == {"problems_slow": 1.0}


def test_what_raises_while_prompts_are_made_leaves_nothing_leased():
    controller = make(tasks=numbers(bad=tuple(range(4))))
    controller.begin(0, 0)
    for _ in range(2):
        with pytest.raises(UserError, match="of the 4 items for training problem 0"):
            controller.lease("w")
    assert controller.status()["leased"] == 0


# ---- long waits


def test_a_long_wait_is_logged_with_what_is_missing_and_again_when_it_has_doubled(tmp_path: Path):
    clock, events = Clock(), EventLog(tmp_path / "events.jsonl")
    controller = make(clock, events, timeouts=Timeouts.Config(warn_after=10.0, batch=100.0), lease_seconds=1000.0)
    controller.begin(0, 0)
    leases = drain(controller, "anna")
    for _ in range(50):
        assert controller.next_batch(0) is None and controller.lease("bert") is None
        clock.now += 1.0
    rows = [row for row in read_rows(events.path) if row["event"] == "waiting"]
    assert [(row["who"], row["seconds"]) for row in rows] == [
        (who, seconds) for seconds in (10.0, 20.0, 40.0) for who in ("trainer", "bert")
    ]
    wait = "work item {} (leased by anna, 20 s since the lease)"
    assert rows[2]["what"] == f"batch 0: {wait.format(0)}, {wait.format(1)}"
    assert rows[3]["what"] == "a lease: all of version 0 are granted, the next come with version 1"
    assert controller.submit(leases[0].id, scored(leases[0]))
    clock.now += 51.0
    with pytest.raises(
        UserError, match=r"trainer has waited 101 s .timeouts.batch=100. for batch 0: work item 1 .leased"
    ):
        controller.next_batch(0)
    assert controller.submit(leases[1].id, scored(leases[1]))
    assert controller.next_batch(0) is not None
    controller.consumed(0)
    controller.published(1)
    assert controller.next_batch(1) is None  # another wait, with a timeouts of its own


# ---- waiting


def test_all_waits_end_at_stop():
    controller = make(clock=None)
    controller.begin(0, 0)
    drain(controller)
    results: list[Any] = []
    waits = [
        threading.Thread(target=lambda: results.append(controller.lease("a", timeout=1e6))),
        threading.Thread(target=lambda: results.append(controller.next_batch(0, timeout=1e6))),
    ]
    for thread in waits:
        thread.start()
    controller.stop()
    for thread in waits:
        thread.join(20)
    assert results == [None, None]
    assert controller.status()["stopped"]
    controller.release("w", "gone")
    assert controller.lease("a") is None  # free, but the run is over


def test_a_waiting_trainer_gets_the_batch_when_the_last_group_arrives():
    controller = make()
    controller.begin(0, 0)
    first, second = drain(controller)
    controller.submit(second.id, scored(second))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(controller.next_batch(0, timeout=1e6)))
    thread.start()
    assert controller.missing(0) == "work item 0 (leased by w, 0 s since the lease)"
    controller.submit(first.id, scored(first))
    thread.join(20)
    assert [group.prompt.id for group in found[0]] == ids(first) + ids(second)


def test_a_waiting_worker_gets_a_lease_when_the_version_it_needs_is_published():
    controller = make()
    controller.begin(0, 0)
    for lease in drain(controller):
        controller.submit(lease.id, scored(lease))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(controller.lease("w", timeout=1e6)))
    thread.start()
    assert controller.next_batch(0) is not None
    controller.consumed(0)
    controller.published(1)
    thread.join(20)
    assert (found[0].step, found[0].version) == (1, 1)


# ---- sizes that cannot be


def test_bad_sizes_are_refused_by_name():
    with pytest.raises(UserError, match="Controller.groups_per_lease: expected a divisor of groups=4, got 3"):
        config(groups_per_lease=3).build()
    with pytest.raises(UserError, match="Controller.staleness: expected 0 or more, got -1"):
        config(staleness=-1).build()
