"""Requests that do more than generate once: tools, given tokens, forks and joins; deadlines and priorities."""

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.commands import Completion, Fork, Generate, Join, Observe, Wait
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import RequestOutput, StopConditions
from tests.rl.rollout.agent_loops.loops import WHOLE, Commands, commands, run
from tests.rl.rollout.small import (
    MAX_NEW,
    TEMPERATURE,
    assert_no_page_is_held,
    assert_same,
    drain,
    make_engine,
    params,
    request,
    scores,
    text,
)

GIVEN = (5, 6, 7)


def one(finished: RequestOutput) -> Rollout:
    (rollout,) = finished.rollouts
    return rollout


# ---- given tokens


def around(completion: Completion) -> Commands:
    """Five drawn, three given, the rest drawn."""
    assert (yield Generate(max_new_tokens=5)) == "length"
    assert (yield Observe(GIVEN)) == 3
    assert len(completion.output_tokens) == 8 and len(completion.prompt) > 0
    assert (yield Generate()) == "length"


@pytest.mark.slow
@pytest.mark.numerics
def test_observed_tokens_are_no_actions_and_what_follows_is_drawn_as_if_they_had_been_there(engine: RolloutEngine):
    q = request(3)
    rollout = one(run(engine, around))
    mask = np.ones(MAX_NEW, bool)
    mask[5:8] = False
    np.testing.assert_array_equal(rollout.action_mask, mask)
    np.testing.assert_array_equal(rollout.tokens[5:8], GIVEN)
    assert np.all(rollout.logprobs[5:8] == 0) and np.all(rollout.versions == 5)
    (scored,) = scores(params(), [(q.prompt, rollout)], TEMPERATURE)
    np.testing.assert_allclose(rollout.logprobs[mask], scored[mask], rtol=0, atol=1e-5)
    (plain,) = engine.generate([request(3, samples=1, stop=WHOLE)])
    np.testing.assert_array_equal(plain.tokens[:5], rollout.tokens[:5])


@pytest.mark.full
def test_a_program_draws_the_same_with_few_pages_and_in_any_company(engine: RolloutEngine):
    expected = run(engine, around, samples=3).rollouts
    small = make_engine(pages=12)
    numbers = [small.submit(request(n, samples=3, stop=WHOLE)) for n in (0, 1)]
    numbers.append(small.submit(request(3, samples=3, stop=WHOLE, agent_loop=around)))
    assert_same(drain(small)[numbers[-1]].rollouts, expected)
    assert min(small.stats()["preemptions"], small.stats()["idle_rows"]) > 0  # some wait for pages, not for a row


@pytest.mark.slow
def test_what_is_observed_beyond_the_room_there_is_is_left_out(engine: RolloutEngine):
    def agent_loop(completion: Completion) -> Commands:
        yield Generate(max_new_tokens=MAX_NEW - 2)
        assert (yield Observe(GIVEN)) == 2
        assert (yield Generate()) == "length"
        assert (yield Observe(GIVEN)) == 0

    rollout = one(run(engine, agent_loop))
    assert len(rollout.tokens) == MAX_NEW and rollout.tokens[-2:].tolist() == [5, 6]
    assert rollout.finish_reason == "length"


def test_on_tokens_hears_given_tokens_too(engine: RolloutEngine):
    heard: list[tuple[list[int], list[float]]] = []
    engine.submit(
        request(3, samples=1, stop=WHOLE, agent_loop=around),
        lambda sample, tokens, logprobs, scores: heard.append((tokens.tolist(), logprobs.tolist())),
    )
    (finished,) = drain(engine).values()
    assert sum((tokens for tokens, _ in heard), []) == one(finished).tokens.tolist()
    assert sum((logprobs for _, logprobs in heard), []) == one(finished).logprobs.tolist()


def test_a_program_may_draw_nothing(engine: RolloutEngine):
    def only_given(completion: Completion) -> Commands:
        yield Observe(GIVEN)

    def nothing(completion: Completion) -> Commands:
        yield from ()

    for samples in (1, 3):
        for agent_loop, length in ((only_given, 3), (nothing, 0)):
            rollouts = run(engine, agent_loop, samples=samples).rollouts
            assert [(len(r.tokens), r.finish_reason) for r in rollouts] == [(length, "stop")] * samples


def test_stop_strings_of_a_step_are_its_own(engine: RolloutEngine):
    (whole,) = engine.generate([request(3, samples=1, stop=WHOLE)])
    string = text(whole.tokens[2:4])

    def agent_loop(completion: Completion) -> Commands:
        assert (yield Generate(strings=(string,))) == "stop"
        assert text(completion.output_tokens).endswith(string) and len(completion.output_tokens) == 4
        assert (yield Generate()) == "length"

    assert_same([one(run(engine, agent_loop))], [whole])  # going on after the cut changes nothing


# ---- waiting


@pytest.mark.slow
def test_no_row_is_idle_while_a_sequence_could_run(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch):
    """Ten loops on four rows, whose tools take up to eleven iterations each; there are pages for all."""
    before, steps, suspended = engine.stats()["idle_rows"], 0, 0
    tools: list[tuple[int, Future[Any]]] = []
    rows_and_waiting: list[tuple[int, float]] = []

    def agent_loop(completion: Completion) -> Commands:
        yield Generate(max_new_tokens=5)
        future: Future[Any] = Future()
        tools.append((steps + 5 * len(tools) % 12, future))
        yield Observe((yield Wait(future)))
        yield Generate(max_new_tokens=5)

    def watched(rows: Any, **how: Any) -> Any:
        rows_and_waiting.append((sum(row is not None for row in rows), engine.stats()["waiting"]))
        return decode(rows, **how)

    decode = engine.executor.decode
    monkeypatch.setattr(engine.executor, "decode", watched)
    for number in (0, 6, 12, 18, 23, 29, 35):  # prompts of one to seven tokens
        engine.submit(request(number, samples=1 + number % 2, stop=WHOLE, agent_loop=agent_loop))
    while engine.busy:
        for due, future in tools:
            if due <= steps and not future.done():
                future.set_result(GIVEN)
        engine.step()
        steps, suspended = steps + 1, max(suspended, int(engine.stats()["suspended"]))
    assert len(tools) == 10 and suspended > 4  # more than there are rows: loops that wait have left theirs
    assert [one for one in rows_and_waiting if one[0] < 4 and one[1]] == []
    assert engine.stats()["idle_rows"] == before
    assert {rows for rows, _ in rows_and_waiting} > {4}  # rows are empty only while all loops wait


@pytest.mark.slow
def test_a_future_gives_its_result_however_late(engine: RolloutEngine):
    future: Future[tuple[int, ...]] = Future()

    def agent_loop(completion: Completion) -> Commands:
        yield Generate(max_new_tokens=5)
        yield Observe((yield Wait(future)))
        yield Generate()

    number = engine.submit(request(3, samples=1, stop=WHOLE, agent_loop=agent_loop))
    other = engine.submit(request(4, samples=1))
    finished: dict[int, RequestOutput] = {}
    while other not in finished or engine.stats()["suspended"] == 0:
        finished |= {f.number: f for f in engine.step()}
    assert number not in finished and engine.stats()["running"] == 0
    future.set_result(GIVEN)
    assert_same([one(drain(engine)[number])], [one(run(engine, around))])


@pytest.mark.slow
def test_who_waits_gives_up_its_pages_when_others_need_them():
    engine = make_engine(pages=12)
    future: Future[tuple[int, ...]] = Future()

    def agent_loop(completion: Completion) -> Commands:
        yield Generate(max_new_tokens=5)
        yield Observe((yield Wait(future)))
        yield Generate()

    number = engine.submit(request(3, samples=2, stop=WHOLE, agent_loop=agent_loop))
    while engine.stats()["suspended"] < 2:
        engine.step()
    engine.generate([request(n, samples=2, stop=WHOLE) for n in (5, 11, 17)])
    assert engine.stats()["preemptions"] > 0 and engine.stats()["suspended"] == 2
    future.set_result(GIVEN)
    found = drain(engine)[number].rollouts
    assert_same(found, run(engine, around, samples=2).rollouts)


def _cancelled() -> Future[Any]:
    future: Future[Any] = Future()
    future.cancel()
    return future


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


FAILURES = [(_failed(ValueError("bad sum")), "ValueError"), (_cancelled(), "CancelledError")]
FAILURES += [(_failed(SystemExit(3)), "RuntimeError"), ("not a future", "UserError")]


@pytest.mark.parametrize("future,name", FAILURES, ids=[name for _, name in FAILURES])
def test_what_a_future_raises_the_program_can_catch_and_otherwise_its_request_fails(
    engine: RolloutEngine, future: Any, name: str
):
    def careful(completion: Completion) -> Commands:
        try:
            yield Wait(future)
        except Exception as error:
            assert type(error).__name__ == name
            yield Observe(GIVEN)

    def careless(completion: Completion) -> Commands:
        yield Wait(future)

    assert one(run(engine, careful)).tokens.tolist() == list(GIVEN)
    finished = run(engine, careless)
    assert one(finished).finish_reason == "error"
    assert re.match(rf"prompt 3 \(chain_sum\), sample 0: {name}\(", finished.error or "")


def test_a_calculator(engine: RolloutEngine):
    """The example of rl/rollout/program.py: a token below 64 calls for the sum of the two tokens before it."""
    calls = tuple(text([token]) for token in range(64))

    def called(completion: np.ndarray) -> tuple[int, ...] | None:
        return tuple(completion[-3:-1].tolist()) if len(completion) and completion[-1] < 64 else None

    with ThreadPoolExecutor(2) as pool:

        def with_calculator(completion: Completion) -> Commands:
            while (yield Generate(strings=calls)) == "stop" and (call := called(completion.output_tokens)) is not None:
                yield Observe([(yield Wait(pool.submit(sum, call))) % 256])

        finished = run(engine, with_calculator, samples=6)
        again = run(engine, with_calculator, samples=6)
    assert_same(again.rollouts, finished.rollouts)
    answers = 0
    for rollout in finished.rollouts:
        for at in np.flatnonzero(~rollout.action_mask):
            asked = rollout.tokens[max(0, at - 3) : at]
            assert asked[-1] < 64 and rollout.tokens[at] == sum(asked[-3:-1]) % 256
            answers += 1
    assert answers > 5 and {r.finish_reason for r in finished.rollouts} == {"length"}


# ---- forks


def test_forks_share_pages_and_draw_by_their_own_sample_ids(engine: RolloutEngine):
    used: list[float] = []

    def leaf(completion: Completion) -> Commands:
        yield Generate(max_new_tokens=4)

    def agent_loop(completion: Completion) -> Commands:
        yield Generate(max_new_tokens=6)
        before = engine.stats()["pages_used"]
        completions = yield Fork(leaf, (7, 9, 1 << 31))
        used.append(engine.stats()["pages_used"] - before)
        rollouts = yield Join(tuple(completions))
        assert [r.sample_id for r in rollouts] == [7, 9, 1 << 31]
        best = max(rollouts, key=lambda r: float(r.logprobs[6:].sum()))
        yield Observe(best.tokens[6:].tolist())
        yield Generate(max_new_tokens=2)

    finished = run(engine, agent_loop)
    root, *leaves = finished.rollouts
    assert used == [0]
    assert [r.sample_id for r in finished.rollouts] == [0, 7, 9, 1 << 31]
    assert len({tuple(r.tokens[6:]) for r in leaves}) == 3
    for r in leaves:
        np.testing.assert_array_equal(r.tokens[:6], root.tokens[:6])
        np.testing.assert_array_equal(r.logprobs[:6], root.logprobs[:6])
        assert len(r.tokens) == 10
    best = max(leaves, key=lambda r: float(r.logprobs[6:].sum()))
    np.testing.assert_array_equal(root.tokens[6:10], best.tokens[6:])
    assert root.action_mask.tolist() == [True] * 6 + [False] * 4 + [True] * 2
    (alone,) = engine.generate(
        [request(3, samples=1, stop=StopConditions(max_new_tokens=10), partial=(_at(root, 6, 9),))]
    )
    np.testing.assert_array_equal(alone.tokens, leaves[1].tokens)
    np.testing.assert_array_equal(alone.logprobs, leaves[1].logprobs)


def _at(rollout: Rollout, length: int, sample: int) -> Rollout:
    records = {name: getattr(rollout, name)[:length] for name in ("tokens", "logprobs", "versions", "action_mask")}
    return Rollout(rollout.prompt_id, sample, finish_reason="abort", **records)


def test_join_answers_for_branches_that_have_ended_long_ago_and_for_none(engine: RolloutEngine):
    seen: list[list[int]] = []

    def leaf(completion: Completion) -> Commands:
        yield Generate(max_new_tokens=1)

    def agent_loop(completion: Completion) -> Commands:
        completions = yield Fork(leaf, (3, 4))
        yield Generate(max_new_tokens=20)
        assert all(one.ended for one in completions)
        seen.append([len(r.tokens) for r in (yield Join((completions[1], completions[0])))])
        seen.append([len(r.tokens) for r in (yield Join(()))])

    assert run(engine, agent_loop).error is None
    assert seen == [[1, 1], []]


@pytest.mark.slow
def test_forks_of_forks_with_few_pages_give_the_same_bits(engine: RolloutEngine):
    def deep(completion: Completion) -> Commands:
        yield Generate(max_new_tokens=3)
        if completion.sample < 20:
            yield Join(tuple((yield Fork(deep, (completion.sample * 4 + 4, completion.sample * 4 + 5)))))
        yield Observe(GIVEN)
        yield Generate()

    expected = run(engine, deep, number=5)
    small = make_engine(pages=12)
    found = run(small, deep, number=5)
    assert len(expected.rollouts) == 7 and small.stats()["preemptions"] > 0
    assert_same(found.rollouts, expected.rollouts)
    assert_no_page_is_held(small)


# ---- deadlines and priorities


def _late(engine: RolloutEngine, turns: int = 0, **fields: Any) -> RequestOutput:
    number = engine.submit(request(3, samples=2, stop=WHOLE, deadline=0.5, **fields))
    ended = [f for _ in range(turns) for f in engine.step()]
    time.sleep(0.5)
    (finished,) = [f for f in [*ended, *engine.step()] if f.number == number]
    assert [(r.sample_id, r.finish_reason) for r in finished.rollouts] == [(0, "deadline"), (1, "deadline")]
    return finished


def test_a_deadline_ends_a_request_wherever_it_is(engine: RolloutEngine):
    assert [len(r.tokens) for r in _late(engine).rollouts] == [0, 0]
    waits = commands(Generate(max_new_tokens=3), Wait(Future()))
    found = _late(engine, turns=2, agent_loop=waits)
    assert [len(r.tokens) for r in found.rollouts] == [3, 3]
    engine.pause()
    assert [len(r.tokens) for r in _late(engine).rollouts] == [0, 0]
    engine.resume()


@pytest.mark.slow
def test_higher_priority_goes_first_and_equals_in_order():
    engine = make_engine(max_num_seqs=4, steps_per_dispatch=4)
    order = [engine.submit(request(n, samples=4, stop=WHOLE, priority=p)) for n, p in enumerate((0, 1, 0, 2, 1))]
    ended: list[int] = []
    while engine.busy:
        ended += [f.number for f in engine.step()]
    assert ended == [order[n] for n in (3, 1, 4, 0, 2)]
