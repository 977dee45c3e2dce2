"""Order, shares and company of training requests; counted in calls, never in seconds."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rl.controller.fair_share import FairShare, Quota
from rl.serving.service.messages import Datum, LossOutput, ServiceBusy, ServiceError, TrainPass, UnknownId
from rl.serving.service.queues import ModelQueue
from rl.serving.service.scheduler import TrainScheduler

WAIT = 30


class Recorder:
    """Runs passes by writing down who was in each call."""

    def __init__(self) -> None:
        self.calls: list[list[TrainPass]] = []

    def __call__(self, passes: Sequence[TrainPass]) -> list[LossOutput]:
        self.calls.append(list(passes))
        return [
            LossOutput(tuple(row.tokens for row in one.rows), {"first": float(one.rows[0].tokens[0])}) for one in passes
        ]


def train_pass(model: str, first: int = 0, rows: int = 1, length: int = 4) -> TrainPass:
    row = Datum(np.full(length, first, np.int32), {})
    return TrainPass(model, (row,) * rows, "cross_entropy", {}, False)


def add(scheduler: TrainScheduler, model: str, number: int, work: Any) -> Future[Any]:
    assert scheduler.reserve(scheduler.every()[model].tenant, model, number)[1], "it is new"
    return scheduler.add(model, number, work)


@contextmanager
def closing(scheduler: TrainScheduler) -> Iterator[TrainScheduler]:
    try:
        yield scheduler
    finally:
        scheduler.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_requests_of_a_model_run_in_the_order_of_their_numbers_however_they_arrive(order: Sequence[int]):
    run: list[int] = []
    with closing(TrainScheduler(Recorder(), FairShare())) as scheduler:
        scheduler.open("a", ModelQueue("one"))
        scheduler.start()
        futures = [add(scheduler, "a", number, lambda number=number: run.append(number)) for number in order]
        for future in futures:
            future.result(WAIT)
    assert run == [0, 1, 2, 3]


@pytest.mark.slow
def test_ten_thousand_tiny_requests_of_a_tenant_do_not_starve_another():
    recorder = Recorder()
    with closing(TrainScheduler(recorder, FairShare(), waiting=20_000)) as scheduler:
        for number in range(20):
            scheduler.open(f"busy{number}", ModelQueue("busy"))
        scheduler.open("quiet", ModelQueue("quiet"))
        for number in range(10_000):
            add(scheduler, f"busy{number % 20}", number // 20, train_pass(f"busy{number % 20}"))
        for number in range(5):
            last = add(scheduler, "quiet", number, train_pass("quiet", rows=30, length=100))
        scheduler.start()
        last.result(WAIT)
    before = list(itertools.takewhile(lambda call: sum(p.model == "quiet" for p in call) == 0, recorder.calls))
    assert len(before) <= 1
    end = max(number for number, call in enumerate(recorder.calls) if any(one.model == "quiet" for one in call))
    tokens = Counter[str]()
    for call in recorder.calls[: end + 1]:
        tokens.update({one.model[:4]: one.tokens for one in call})
        assert sum(len(one.rows) for one in call) <= 32
    assert tokens["busy"] <= tokens["quie"] + 3000, "no more than its share, in tokens"


def test_tenants_have_equal_shares_of_tokens_however_many_models_they_have():
    recorder = Recorder()
    with closing(TrainScheduler(recorder, FairShare(), waiting=5000, rows=1)) as scheduler:
        for tenant, models, length in (("many", 9, 50), ("one", 1, 100)):
            for model in range(models):
                scheduler.open(f"{tenant}{model}", ModelQueue(tenant))
                for number in range(2700 // models):
                    add(scheduler, f"{tenant}{model}", number, train_pass(f"{tenant}{model}", length=length))
        scheduler.start()
        while scheduler.calls < 600:
            pass
    spent = Counter[str]()
    for call in recorder.calls[:600]:
        spent[call[0].model[:-1]] += call[0].tokens
    assert abs(spent["many"] - spent["one"]) <= 2 * 256 + 150


def test_an_error_is_of_its_request_alone():
    recorder = Recorder()

    def broken() -> None:
        raise ServiceError("no gradient")

    with closing(TrainScheduler(recorder, FairShare())) as scheduler:
        for model in "ab":
            scheduler.open(model, ModelQueue("one"))
        works = [train_pass("a", 3), broken, train_pass("a", 7)]
        a = [add(scheduler, "a", number, work) for number, work in enumerate(works)]
        b = add(scheduler, "b", 0, train_pass("b", 5))
        scheduler.start()
        assert b.result(WAIT).metrics == {"first": 5.0}
        assert a[2].result(WAIT).metrics == {"first": 7.0}
        assert [type(one.exception()) for one in a] == [type(None), ServiceError, type(None)]
    assert [one.model for one in recorder.calls[0]] == ["a", "b"], "they were in one call"


def test_a_large_pass_is_cut_into_parts_and_the_work_of_others_comes_between():
    recorder, whole = Recorder(), train_pass("large", 2, rows=300)
    with closing(TrainScheduler(recorder, FairShare(quantum=8))) as scheduler:
        for name in ("large", "quiet"):
            scheduler.open(name, ModelQueue(name))
        large = add(scheduler, "large", 0, whole)
        behind = add(scheduler, "large", 1, train_pass("large", 3))
        small = [add(scheduler, "quiet", number, train_pass("quiet", 5, rows=20)) for number in range(3)]
        scheduler.start()
        output = large.result(WAIT)
        behind.result(WAIT)
        assert all(one.result(WAIT) for one in small)
    assert len(output.logprobs) == 300 and output.metrics == {"first": 20.0}, "ten parts, each with its sums"
    order = [[(one.model, len(one.rows)) for one in call] for call in recorder.calls]
    assert max(number for number, call in enumerate(order) if call[0][0] == "quiet") <= 5
    parts = [rows for call in order for model, rows in call if model == "large"]
    assert parts == [32] * 9 + [12, 1], "what is behind it comes last"


def test_passes_of_a_model_that_follow_each_other_share_a_call_up_to_its_rows():
    recorder, ran = Recorder(), list[str]()
    with closing(TrainScheduler(recorder, FairShare(), rows=8)) as scheduler:
        for name in "ab":
            scheduler.open(name, ModelQueue(name))
        works = [train_pass("a", first) for first in range(1, 4)]
        works += [lambda: ran.append("step"), *(train_pass("a", first) for first in range(4, 20))]
        a = [add(scheduler, "a", number, work) for number, work in enumerate(works)]
        b = [add(scheduler, "b", number, train_pass("b", 9)) for number in range(3)]
        scheduler.start()
        for future in (*a, *b):
            future.result(WAIT)
    assert [one.result().metrics["first"] for one in a if one.result()] == [float(n) for n in range(1, 20)]
    calls = ["".join(one.model for one in call) for call in recorder.calls]
    assert sorted(calls[0]) == list("aaabbb"), "not beyond the step"
    assert calls[1:] == ["a" * 8, "a" * 8], "nor beyond the rows"
    firsts = [one.rows[0].tokens[0] for call in recorder.calls for one in call if one.model == "a"]
    assert firsts == list(range(1, 20)) and ran == ["step"]


def test_rows_of_few_tokens_pay_for_what_they_take():
    """One step of another tenant comes after every few calls of them, though they have hardly any tokens."""
    order = list[str]()

    def passes(given: Sequence[TrainPass]) -> list[LossOutput]:
        order.append("tiny")
        return [LossOutput((), {}) for _ in given]

    with closing(TrainScheduler(passes, FairShare(), waiting=2000)) as scheduler:
        for tenant in ("tiny", "other"):
            scheduler.open(tenant, ModelQueue(tenant))
        tiny = [add(scheduler, "tiny", number, train_pass("tiny", length=1)) for number in range(1600)]
        other = [add(scheduler, "other", number, lambda: order.append("step")) for number in range(40)]
        scheduler.start()
        for future in (*tiny, *other):
            future.result(WAIT)
    places = [place for place, name in enumerate(order) if name == "step"]
    assert order.count("tiny") == 50 and max(b - a for a, b in itertools.pairwise(places)) <= 2


def test_work_for_idle_times_comes_behind_tasks_and_may_fail():
    order: list[str] = []

    def broken() -> None:
        order.append("broken")
        raise ZeroDivisionError("fault")

    with closing(TrainScheduler(Recorder(), FairShare())) as scheduler:
        scheduler.open("a", ModelQueue("one"))
        scheduler.when_idle([broken, lambda: order.append("idle")])
        futures = [add(scheduler, "a", number, lambda: order.append("task")) for number in range(3)]
        scheduler.start()
        for future in futures:
            future.result(WAIT)
        done: Future[None] = Future()
        scheduler.when_idle([lambda: done.set_result(None)])
        done.result(WAIT)
        add(scheduler, "a", 3, lambda: order.append("later")).result(WAIT)
    assert order == ["task"] * 3 + ["broken", "idle", "later"]


def test_a_fault_of_the_passes_fails_those_of_the_call_and_the_thread_goes_on():
    def passes(given: Sequence[TrainPass]) -> list[LossOutput]:
        if given[0].model == "a":
            raise ZeroDivisionError("fault")
        return [LossOutput((), {}) for _ in given]

    with closing(TrainScheduler(passes, FairShare())) as scheduler:
        for model in "ab":
            scheduler.open(model, ModelQueue("one"))
        first = add(scheduler, "a", 0, train_pass("a"))
        scheduler.start()
        with pytest.raises(ZeroDivisionError):
            first.result(WAIT)
        assert add(scheduler, "b", 0, train_pass("b")).result(WAIT) == LossOutput((), {})


def test_a_tenant_has_a_limit_but_what_others_wait_for_is_accepted():
    with closing(TrainScheduler(Recorder(), FairShare(), waiting=3)) as scheduler:
        for tenant in ("one", "two"):
            scheduler.open(tenant, ModelQueue(tenant))
        futures = [add(scheduler, "one", number, train_pass("one")) for number in (1, 2)]
        with pytest.raises(ServiceBusy):
            add(scheduler, "one", 3, train_pass("one"))  # too far ahead
        scheduler.open("second", ModelQueue("one"))
        futures.append(add(scheduler, "second", 0, train_pass("second")))
        with pytest.raises(ServiceBusy):
            add(scheduler, "second", 1, train_pass("second"))
        futures.append(add(scheduler, "two", 0, train_pass("two")))
        futures.append(add(scheduler, "one", 0, train_pass("one")))
        scheduler.start()
        for future in futures:
            future.result(WAIT)
        add(scheduler, "one", 3, train_pass("one")).result(WAIT)


def test_a_tenant_beyond_its_quota_waits_is_told_so_and_the_others_go_on():
    now, limit = [0.0], Quota(tokens_per_second=100.0)
    share = FairShare(quotas={"busy": limit}, clock=lambda: now[0])
    with closing(TrainScheduler(Recorder(), share, waiting=3)) as scheduler:
        for tenant in ("busy", "quiet"):
            scheduler.open(tenant, ModelQueue(tenant))
        busy = [add(scheduler, "busy", number, train_pass("busy", length=100)) for number in range(3)]
        with pytest.raises(ServiceBusy, match=r"\(the quota of 'busy': tokens_per_second=100\)$"):
            add(scheduler, "busy", 3, train_pass("busy"))
        scheduler.start()
        busy[0].result(WAIT)
        for number in range(3):
            add(scheduler, "quiet", number, train_pass("quiet", length=100)).result(WAIT)
        assert not busy[1].done(), "its second has passed for nobody"
        now[0] = 1.5
        busy[1].result(WAIT)
        assert not busy[2].done()
        now[0] = 3.0
        busy[2].result(WAIT)


def test_the_end_of_a_model_comes_behind_what_was_accepted_and_fails_what_can_never_run():
    run: list[Any] = []
    with closing(TrainScheduler(Recorder(), FairShare())) as scheduler:
        scheduler.open("a", ModelQueue("one"))
        first = add(scheduler, "a", 0, lambda: run.append(0))
        late = add(scheduler, "a", 2, lambda: run.append(2))
        end, after = scheduler.reserve_end("one", "a")
        assert after == 0
        scheduler.finish("a", 0, lambda: run.append("end"), end)
        assert scheduler.reserve_end("one", "a") == (end, None)
        with pytest.raises(UnknownId, match="no model 'a'"):
            scheduler.reserve("one", "a", 1)
        with pytest.raises(ServiceError, match="was unloaded"):
            late.result(WAIT)
        scheduler.start()
        end.result(WAIT)
        first.result(WAIT)
        scheduler.remove("a")
        scheduler.open("a", ModelQueue("one"))
        add(scheduler, "a", 0, lambda: run.append("again")).result(WAIT)
    assert run == [0, "end", "again"]
