"""Controllers of several policies: real ones, whose trainers and workers are played by the test."""

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.controller.controller import PROMPTS_WAIT, Controller
from rl.controller.fair_share import FairShare, Quota
from rl.controller.leasing import LEASES_PER_POLICY
from rl.protocol.messages import Group, Lease
from rl.runtime.policies.changes import TakenChanges, failures
from rl.runtime.policies.controllers import Controllers
from tests.rl.controller.scripted import STEPS, assert_same_prompts, config, drain, scored
from tests.rl.runtime.policies.tiny_policies import tiny_policies
from tests.rl.tiny import make_group, tiny_experiment, tiny_run, tiny_tasks


def controller(number: int, *, incarnation: int = 0, **changes: Any) -> Controller:
    cfg = config(tasks=tiny_tasks(number), staleness=STEPS, **changes)
    return cfg.build(first_lease=number * LEASES_PER_POLICY + incarnation * 10**9)


def together(
    names: str = "ab",
    shares: dict[str, float] | None = None,
    events: EventLog | None = None,
    incarnation: int = 0,
    **limits: Any,
) -> Controllers:
    """Return controllers of these policies, begun at update 0 with all steps to be leased."""
    found = {name: controller(number, incarnation=incarnation) for number, name in enumerate(names)}
    for each in found.values():
        each.begin(0, 0)
        for item in range(2 * STEPS):  # made before they are asked for, or who is faster has more turns
            each.prompts(*divmod(item, 2))
    return Controllers(found, FairShare(shares, quantum=1, **limits), events)


def answers(lease: Lease, tokens: int = 4) -> tuple[Group, ...]:
    """Return scored groups in which each of the lease's rollouts has so many tokens."""
    rewards = [float(n) for n in range(lease.samples)]
    return tuple(make_group(p, [[1] * tokens] * lease.samples, rewards, version=lease.version) for p in lease.prompts)


def carried_out(controllers: Controllers, leases: int, tokens: dict[str, int] | None = None) -> list[Lease]:
    """Lease and submit one after the other; a policy's rollouts have as many tokens as `tokens` says."""
    found: list[Lease] = []
    while len(found) < leases and (lease := controllers.lease("w")) is not None:
        assert controllers.generated(lease.id)
        assert controllers.submit(lease.id, answers(lease, (tokens or {}).get(lease.policy, 4)))
        found.append(lease)
    return found


def of(leases: Sequence[Lease], policy: str) -> list[Lease]:
    return [lease for lease in leases if lease.policy == policy]


def test_each_policy_gets_the_leases_that_it_would_get_alone():
    leases = drain_all(together())
    for number, name in enumerate("ab"):
        alone = controller(number)
        alone.begin(0, 0)
        expected = drain(alone)
        found = of(leases, name)
        assert len(expected) == len(found) == 2 * STEPS
        for one, other in zip(expected, found, strict=True):
            assert_same_prompts(one, other)
            assert (one.id, one.rerun, one.partial) == (other.id, other.rerun, other.partial)


def drain_all(controllers: Controllers) -> list[Lease]:
    return list(iter(lambda: controllers.lease("w"), None))


def test_leases_interleave_by_the_tokens_that_policies_draw():
    equal = carried_out(together(), 12, {"a": 5, "b": 1})
    tokens = Counter({name: len(of(equal, name)) * size for name, size in (("a", 5), ("b", 1))})
    assert Counter(lease.policy for lease in equal) == {"a": 2, "b": 10} and tokens == {"a": 10, "b": 10}
    weighted = carried_out(together(shares={"b": 3.0}), 12)
    assert Counter(lease.policy for lease in weighted) == {"a": 3, "b": 9}
    assert {lease.policy for lease in weighted[:4]} == {"a", "b"}  # turns, not one after the other


def test_a_policy_gets_no_lease_beyond_its_quota_and_the_others_go_on():
    now = [0.0]
    quotas = {"a": Quota(tokens_in_flight=1.0), "b": Quota(tokens_per_second=2.0)}
    controllers = together("abc", quotas=quotas, clock=lambda: now[0])
    first = [controllers.lease("w") for _ in range(6)]
    assert Counter(lease.policy for lease in first if lease) == {"a": 1, "b": 1, "c": 4}
    (held,) = [lease for lease in first if lease and lease.policy == "a"]
    (slow,) = [lease for lease in first if lease and lease.policy == "b"]
    assert controllers.submit(slow.id, answers(slow, 5)) and controllers.submit(held.id, answers(held, 5))
    controllers.of("c").stop()
    drawn = 5 * slow.samples * len(slow.prompts)
    for seconds, expected in ((0.0, "a"), (drawn / 2 - 0.1, None), (drawn / 2 + 0.1, "b")):
        now[0] = seconds
        lease = controllers.lease("w", timeout=-1.0)
        assert (lease.policy if lease else None) == expected


def test_a_policy_without_work_leaves_the_fleet_to_the_others():
    controllers = together()
    assert len(of(carried_out(controllers, 4 * STEPS), "a")) == 2 * STEPS
    assert controllers.lease("w") is None
    other = together()
    other.fail("a", "test")
    assert len(of(carried_out(other, 4 * STEPS), "b")) == 2 * STEPS


def test_what_is_submitted_for_one_policy_never_reaches_another():
    controllers = together("abc")
    leases = carried_out(controllers, 6 * STEPS)
    assert Counter(lease.policy for lease in leases) == dict.fromkeys("abc", 2 * STEPS)
    for number, name in enumerate("abc"):
        alone = controller(number)
        alone.begin(0, 0)
        for step in range(STEPS):
            batch = controllers.of(name).next_batch(step)
            assert batch is not None
            prompts = [prompt.id for item in range(2) for prompt in alone.prompts(step, item)]
            assert [group.prompt.id for group in batch] == prompts
    status = controllers.status()
    assert status["verified"] == 6 * STEPS and status["policies"]["b"]["verified"] == 2 * STEPS


def test_one_policy_is_evaluated_while_others_are_not(tmp_path: Path):
    cfg = tiny_experiment()
    first = cfg.build().make_controller(tiny_run(tmp_path, cfg))
    first.begin(0, 0)
    controllers = Controllers({"a": first, "b": controller(1)}, FairShare(None, quantum=1))
    by_policy = controllers.status()["policies"]
    assert (by_policy["a"]["evaluating"], by_policy["b"]["evaluating"]) == (0, None)


def test_a_policy_that_fails_is_named_and_gets_nothing_more(tmp_path: Path):
    events = EventLog(tmp_path / "events.jsonl")
    controllers = together(events=events)
    held = {lease.policy: lease for lease in (controllers.lease("w"), controllers.lease("v")) if lease}
    assert set(held) == {"a", "b"}
    controllers.fail("a", "NaN in its gradient")
    controllers.fail("a", "again")
    assert controllers.failed() == {"a": "NaN in its gradient"}
    lost = held["a"].id
    assert not controllers.renew(lost)
    assert not controllers.generated(lost)
    assert not controllers.submit(lost, scored(held["a"]))
    assert not controllers.hand_back(lost, ())
    assert controllers.submit(held["b"].id, scored(held["b"]))
    assert {lease.policy for lease in drain_all(controllers)} == {"b"}
    assert not controllers.status()["stopped"]
    rows = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "policy_failed"]
    assert [(row["policy"], row["why"]) for row in rows] == [("a", "NaN in its gradient")]
    controllers.fail("b", "its reward")
    assert controllers.status()["stopped"] and controllers.lease("w", timeout=60) is None


def test_a_policy_that_is_stopped_loses_its_leases_and_one_that_joins_or_resumes_gets_new_ones(tmp_path: Path):
    whole = RunDirectory.attach(tmp_path)

    def make(name: str, others: Collection[int]) -> Controller:
        if name == "bad":
            raise UserError("tasks: there are none")
        made.append(name)
        known = {"a": 0, "b": 1}.get(name)
        found = controller(max(others) + 1 if known is None else known, incarnation=made.count(name))
        found.begin(0, 0)
        return found

    made = list[str]()
    found = {"a": make("a", ()), "b": make("b", ())}
    share, log = FairShare(quantum=1), EventLog(whole.events_path)
    controllers = Controllers(found, share, log, make=make, taken=TakenChanges(whole))
    controllers.join("w")
    former = list[Lease]()
    while {lease.policy for lease in former} != {"a", "b"}:
        former += filter(None, [controllers.lease("w", 30.0)])
    held = {lease.policy: lease for lease in former}
    controllers.dismiss("a", 1)
    assert not controllers.renew(held["a"].id) and not controllers.submit(held["a"].id, scored(held["a"]))
    assert controllers.renew(held["b"].id) and controllers.of("a").stopped
    controllers.admit("c", 2)
    controllers.admit("bad", 3)
    assert controllers.failed() == {"bad": "tasks: there are none"}
    controllers.admit("a", 4)
    again = controllers.of("a")
    controllers.admit("a", 4)
    controllers.dismiss("a", 1)
    assert controllers.of("a") is again and not again.stopped, "a change is taken up once"
    assert controllers.status()["policies"]["c"]["workers"] == ["w"], "those that had joined"
    assert not controllers.renew(held["a"].id), "a lease of before it was stopped"
    given = len(of(former, "b"))
    leases = [controllers.lease("w", 30.0) for _ in range(3 * 2 * STEPS - given)]
    counts = Counter(lease.policy for lease in leases if lease)
    assert counts == {"a": 2 * STEPS, "b": 2 * STEPS - given, "c": 2 * STEPS}
    ids = [lease.id for lease in (*former, *leases) if lease]
    assert len(set(ids)) == len(ids) and {one // LEASES_PER_POLICY for one in ids} == {0, 1, 2}
    after = TakenChanges(whole)
    assert [after.is_new(name, number) for name, number in (("a", 4), ("a", 5), ("c", 2), ("b", 1))] == [
        *(False, True, False, True)
    ]
    assert failures(whole) == {"bad": "tasks: there are none"} and not after.is_stopped("a")


def test_problems_that_cannot_be_made_fail_their_policy_alone():
    found = {"a": controller(0, max_prompt_tokens=1, long_prompts="refuse"), "b": controller(1)}
    for each in found.values():
        each.begin(0, 0)
    controllers = Controllers(found, FairShare())
    assert {lease.policy for lease in drain_all(controllers)} == {"b"}
    assert list(controllers.failed()) == ["a"] and "max_prompt_tokens" in controllers.failed()["a"]


def test_after_a_kill_leases_of_the_former_incarnation_are_void_and_ids_never_return():
    former = drain_all(together("abc"))
    controllers = together("abc", incarnation=1)
    again = drain_all(controllers)
    ids = [lease.id for lease in (*former, *again)]
    assert len(set(ids)) == len(ids) == 12 * STEPS
    for lease in former:
        assert not controllers.submit(lease.id, scored(lease))
        assert not controllers.renew(lease.id)
    for one, other in zip(
        sorted(former, key=lambda lease: lease.id), sorted(again, key=lambda lease: lease.id), strict=True
    ):
        assert one.policy == other.policy and (one.rerun, other.rerun) == (False, True)
        assert_same_prompts(one, other)
        assert controllers.submit(other.id, scored(other))
    assert not controllers.renew(10**15 * 3) and not controllers.renew(-1)  # nobody's


def test_leases_of_a_worker_that_leaves_are_granted_again_whichever_policy_they_are_of():
    controllers = together()
    controllers.join("gone")
    held = [controllers.lease("gone") for _ in range(4)]
    assert controllers.status()["workers"] == ["gone"] and controllers.status()["leased"] == 4
    controllers.leave("gone")
    assert controllers.status()["workers"] == []
    again = [controllers.lease("w") for _ in range(4)]
    key = lambda lease: (lease.policy, lease.step, [prompt.id for prompt in lease.prompts])  # noqa: E731
    assert sorted(map(key, held)) == sorted(map(key, again))


def test_a_wait_ends_with_new_work_of_any_policy_or_the_end_of_the_run():
    controllers = Controllers({name: controller(n) for n, name in enumerate("ab")}, FairShare())
    found: list[Lease | None] = []

    def wait() -> None:
        found.append(controllers.lease("w", timeout=600))

    for wake in (lambda: controllers.of("b").begin(0, 0), controllers.stop):
        controllers.of("b").begin(STEPS, STEPS)  # nothing is left of it
        thread = threading.Thread(target=wait)
        thread.start()
        wake()
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert found[0] is not None and found[0].policy == "b" and found[1] is None


def test_prompts_that_are_being_made_are_awaited_but_by_a_worker_that_has_other_work():
    gate, slow = threading.Event(), controller(0)
    tasks: Any = slow._plan._tasks
    train = tasks.train
    tasks.train = lambda index: train(index) if gate.wait(60) else None
    slow.begin(0, 0)
    controllers = Controllers({"a": slow}, FairShare())
    began = time.monotonic()
    assert controllers.lease("w", timeout=-1.0) is None and time.monotonic() - began < PROMPTS_WAIT / 2
    threading.Timer(0.2, gate.set).start()
    assert controllers.lease("w", timeout=0.0) is not None


def test_nothing_is_computed_while_nothing_can_be_leased():
    controllers = together()
    drain_all(controllers)
    began = time.thread_time()
    assert controllers.lease("w", timeout=1.5) is None
    assert time.thread_time() - began < 0.5


def test_many_workers_ask_at_once():
    controllers = together("abcd")
    found: list[Lease] = []

    def work(worker: str) -> None:
        controllers.join(worker)
        while (lease := controllers.lease(worker)) is not None:
            controllers.heard(worker)
            assert controllers.renew(lease.id) and controllers.submit(lease.id, answers(lease))
            found.append(lease)

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({lease.id for lease in found}) == len(found) == 8 * STEPS
    assert all(controllers.of(name).next_batch(step) is not None for name in "abcd" for step in range(STEPS))


def test_lease_ids_of_an_experiment_begin_at_the_number_of_the_policy(tmp_path: Path):
    cfg = tiny_policies({}, evaluation=None)
    with tiny_run(tmp_path, cfg) as run:
        log, experiment = EventLog(run.events_path), cfg.build()
        for incarnation in range(2):
            made = experiment.make_controller(run, number=3)
            made.begin(0, 0)
            lease = made.lease("w")
            assert lease is not None and lease.id == 3 * LEASES_PER_POLICY + incarnation * 10**9
            assert lease.rerun == (incarnation > 0)
            log.append("controller", "start")


def test_failures_are_those_since_the_run_was_last_begun(tmp_path: Path):
    with tiny_run(tmp_path, tiny_policies({})) as run:
        log = EventLog(run.events_path)
        assert failures(run) == {}
        log.append("driver", "session")
        Controllers({"a": controller(0)}, FairShare(), log).fail("a", "NaN")
        known = failures(run)
        assert known == {"a": "NaN"}
        again = Controllers({"a": controller(0), "b": controller(1)}, FairShare(), log, known)
        assert again.failed() == known and again.of("a").stopped and not again.of("b").stopped
        log.append("driver", "session")
        assert failures(run) == {}


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match="there is no policy 'aa'; did you mean 'a'"):
        together().of("aa")
