"""The engine behind its queue: every request's events arrive, and an error ends what it concerns and no more."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from mesh import UserError
from rl.protocol.messages import Rollout
from rl.rollout.request import Request
from rl.serving.engine_thread import Done, EngineThread, Event, Failed, NewTokens, Stream
from rl.serving.errors import ApiError
from tests.rl.serving.running import as_prompt, eventually, make_engine, make_params


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    thread = EngineThread(make_engine())
    thread.start()
    yield thread
    thread.close()


def run[T](work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


async def all_events(stream: Stream) -> list[Event]:
    """Collect events until every request is done, or all have failed."""
    events: list[Event] = []
    while not events or (
        not isinstance(events[-1], Failed) and sum(isinstance(e, Done) for e in events) < len(stream.requests)
    ):
        events.append(await stream.next())
    return events


def request(text: str, samples: int = 2, **fields: Any) -> Request:
    return Request(as_prompt(text), samples=samples, seed=7, **fields)


def same(a: Rollout, b: Rollout) -> bool:
    return bool(np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs))


@pytest.mark.slow
def test_tokens_arrive_in_pieces_that_make_the_engines_rollouts(thread: EngineThread) -> None:
    requests = [request("one"), request("two", 1)]

    async def work() -> list[Event]:
        return await all_events(thread.submit(requests))

    events = run(work())
    done = {event.index: event.rollouts for event in events if isinstance(event, Done)}
    expected = make_engine().generate(requests)
    assert len(expected) == 3
    assert all(same(a, b) for a, b in zip([*done[0], *done[1]], expected, strict=True))
    for index, rollouts in done.items():
        for rollout in rollouts:
            pieces = [
                e for e in events if isinstance(e, NewTokens) and (e.index, e.sample) == (index, rollout.sample_id)
            ]
            assert np.concatenate([piece.tokens for piece in pieces]).tolist() == rollout.tokens.tolist()
            assert np.concatenate([piece.logprobs for piece in pieces]).tolist() == rollout.logprobs.tolist()


def test_if_one_request_is_refused_none_runs(thread: EngineThread) -> None:
    async def work() -> tuple[list[Event], list[Event]]:
        refused = await all_events(thread.submit([request("fits"), request("x" * 99)]))
        return refused, await all_events(thread.submit([request("fits")]))

    refused, answered = run(work())
    assert [type(event) for event in refused] == [Failed]
    assert isinstance(refused[0], Failed) and refused[0].error.status == 400
    assert thread.stats["requests"] - thread.stats["aborted"] == 1
    assert isinstance(answered[-1], Done)
    assert thread.alive


def test_an_aborted_stream_is_silent_and_the_others_go_on(thread: EngineThread) -> None:
    async def work() -> tuple[Stream, list[Event]]:
        thread.pause().result(10)
        gone, stays = thread.submit([request("gone")]), thread.submit([request("stays")])
        thread.abort(gone)
        thread.resume().result(10)
        return gone, await all_events(stays)

    gone, events = run(work())
    assert isinstance(events[-1], Done)
    assert not gone.begun


def test_nothing_runs_while_paused(thread: EngineThread) -> None:
    async def work() -> None:
        thread.pause().result(10)
        stream = thread.submit([request("later")])
        for _ in range(20):  # each wakes the thread
            thread.pause().result(10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.next(), 0.3)
        thread.resume().result(10)
        assert isinstance((await all_events(stream))[-1], Done)

    run(work())


def test_new_weights_are_used_from_the_next_turn(thread: EngineThread) -> None:
    async def work() -> Event:
        thread.set_weights(make_params(1), 4).result(10)
        return (await all_events(thread.submit([request("one")])))[-1]

    event = run(work())
    assert thread.version == 4
    assert isinstance(event, Done)
    assert all((rollout.versions == 4).all() for rollout in event.rollouts)
    old = make_engine().generate([request("one")])
    assert not any(same(a, b) for a, b in zip(event.rollouts, old, strict=True))


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(thread: EngineThread) -> None:
    with pytest.raises(UserError, match="weights: "):
        thread.set_weights({"no": {"parameters": np.zeros(3, np.float32)}}, 4).result(10)
    assert thread.version == 3 and thread.alive


def test_an_error_of_the_engine_ends_its_request_and_no_other(thread: EngineThread) -> None:
    """Weights that are not numbers give logits that are none."""
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), make_params(0))

    async def work() -> tuple[list[Event], list[Event]]:
        thread.set_weights(broken, 4).result(10)
        failed = await all_events(thread.submit([request("one")]))
        thread.set_weights(make_params(0), 5).result(10)
        return failed, await all_events(thread.submit([request("two")]))

    failed, answered = run(work())
    assert isinstance(failed[-1], Failed)
    assert (failed[-1].error.status, failed[-1].error.code) == (500, "generation_failed")
    assert "not all numbers" in failed[-1].error.message
    assert isinstance(answered[-1], Done) and thread.alive


def test_a_step_that_fails_ends_its_requests_and_the_next_are_answered(thread: EngineThread) -> None:
    """Pages that are gone, as after a dispatch that failed with their memory given away."""

    async def work() -> tuple[list[list[Event]], list[Event]]:
        first = await all_events(thread.submit([request("three")]))
        thread.pause().result(10)
        streams = [thread.submit([request(text)]) for text in ("one", "two")]
        jax.tree.map(lambda pages: pages.delete(), thread._engine.runner.cache.pool)
        thread.resume().result(10)
        return [await all_events(stream) for stream in streams], [
            *first,
            *await all_events(thread.submit([request("three")])),
        ]

    failed, answered = run(work())
    for events in failed:
        assert isinstance(events[-1], Failed) and events[-1].error.code == "engine_failed"
        assert events[-1].error.status == 500 and "deleted" in events[-1].error.message
    before, after = (event.rollouts for event in answered if isinstance(event, Done))
    assert all(same(a, b) for a, b in zip(before, after, strict=True))
    assert thread.alive and thread.stats["pages_used"] == thread.stats["prefix_cache_pages"]


def test_an_engine_that_cannot_go_on_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = EngineThread(make_engine(weights=False))  # it cannot make a step
    monkeypatch.setattr(thread._engine.runner.cache, "_cache_shape", None)  # nor allocate its pages again
    thread.start()

    async def work() -> list[list[Event]]:
        return [await all_events(thread.submit([request(text)])) for text in ("one", "two")]

    told, late = run(work())
    assert isinstance(told[-1], Failed) and told[-1].error.status == 500
    assert isinstance(late[0], Failed) and late[0].error.status == 503
    assert thread.failure is not None and not thread.alive
    thread.close()


def test_all_can_be_ended_with_a_reason(thread: EngineThread) -> None:
    async def work() -> list[Event]:
        thread.pause().result(10)
        stream = thread.submit([request("one")])
        thread.abort_all(ApiError(503, "over"))
        return await all_events(stream)

    (event,) = run(work())
    assert isinstance(event, Failed) and event.error.message == "over"


def test_closing_ends_the_thread(thread: EngineThread) -> None:
    thread.close()
    assert eventually(lambda: not thread.alive)


def test_the_engines_figures_are_there(thread: EngineThread) -> None:
    assert thread.stats["pages"] > 0 and thread.stats["pages_used"] == 0
