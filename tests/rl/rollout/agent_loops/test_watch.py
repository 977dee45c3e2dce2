"""Watches read draws as they go on, end them where the tokens say so, and change nothing where they fail."""

import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest

from rl.rollout.agent_loops.commands import Abort, Command, Completion, Generate, Observe
from rl.rollout.engine import RolloutEngine
from rl.rollout.scheduling.watching import LIMIT_S
from tests.rl.rollout.agent_loops.loops import WHOLE, run
from tests.rl.rollout.small import MAX_NEW, assert_same, drain, make_engine, request


class Until:
    """Ends a draw behind the first token that a number divides."""

    def __init__(self, divisor: int):
        self._divisor, self.read = divisor, list[int]()
        self.threads = set[int]()

    def feed(self, tokens: Sequence[int]) -> Abort | None:
        self.threads.add(threading.get_ident())
        self.read += tokens
        found = next((n for n, token in enumerate(self.read, 1) if token % self._divisor == 0), None)
        return None if found is None else Abort(found, "divided")


class Failing:
    def __init__(self, *, hangs: bool = False, kept: int | None = None):
        self._hangs, self._kept, self.calls = hangs, kept, 0

    def feed(self, tokens: Sequence[int]) -> Abort | None:
        self.calls += 1
        if self._kept is not None:
            return Abort(self._kept, "too many")
        if not self._hangs:
            raise KeyError("broken")
        time.sleep(3 * LIMIT_S)
        return Abort(1, "too late")


def in_pieces(completion: Completion) -> Generator[Command, Any, None]:
    """Draw to the end: each draw ends behind a token that 7 divides, and a token is given then."""
    while (reason := (yield Generate(watch=Until(7)))) != "length":
        assert reason == "divided" and completion.output_tokens[-1] % 7 == 0
        yield Observe([3])


@pytest.fixture(scope="module")
def pieces() -> list[Any]:
    """The rollouts of `in_pieces`, computed by draws of one token: no watch, and nothing to drop."""

    def stepwise(completion: Completion) -> Generator[Command, Any, None]:
        while len(completion.output_tokens) < MAX_NEW:
            yield Generate(1)
            if completion.output_tokens[-1] % 7 == 0:
                yield Observe([3])

    engine = make_engine(steps_per_dispatch=1)
    return list(run(engine, stepwise, samples=3).rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"steps_per_dispatch": 1}, {"steps_per_dispatch": 32}, {"pages": 12}])
def test_a_draw_ends_where_its_tokens_say_however_it_is_cut_into_dispatches(
    changes: dict[str, Any], pieces: list[Any]
) -> None:
    engine = make_engine(**changes)
    numbers = [engine.submit(request(n, samples=3, stop=WHOLE)) for n in (0, 1)]
    numbers.append(engine.submit(request(3, samples=3, stop=WHOLE, agent_loop=in_pieces)))
    found = drain(engine)[numbers[-1]].rollouts
    assert any(token == 3 for token in found[0].tokens)
    assert_same(found, pieces)
    assert engine.stats()["watch_aborts"] > 0 and engine.stats()["watch_failures"] == 0


def test_a_watch_reads_all_tokens_of_its_draw_in_another_thread(engine: RolloutEngine) -> None:
    watch = Until(10**6)

    def loop(completion: Completion) -> Generator[Command, Any, None]:
        yield Generate(5)
        assert (yield Generate(7, watch=watch)) == "length"
        assert watch.read == completion.output_tokens[5:].tolist() and len(watch.read) == 7
        yield Generate()

    (rollout,) = run(engine, loop).rollouts
    (plain,) = engine.generate([request(3, samples=1, stop=WHOLE)])
    assert_same([rollout], [plain])
    assert threading.get_ident() not in watch.threads and len(watch.read) == 7


def test_the_end_by_a_watch_is_a_finish_reason_of_a_whole_rollout(engine: RolloutEngine) -> None:
    def loop(completion: Completion) -> Generator[Command, Any, None]:
        while (yield Generate(watch=Until(2))) == "length":
            raise AssertionError("expected an even token")

    found = run(engine, loop).rollouts[0]
    assert found.finish_reason == "watch" and found.tokens[-1] % 2 == 0
    again = engine.generate([request(3, samples=1, partial=(found,), agent_loop=loop)])
    assert_same(again, [found])


def test_tokens_that_a_watch_drops_are_never_streamed(engine: RolloutEngine) -> None:
    streamed: list[int] = []
    number = engine.submit(
        request(3, samples=1, stop=WHOLE, agent_loop=in_pieces),
        on_tokens=lambda sample, tokens, logprobs, scores: streamed.extend(tokens.tolist()),
    )
    (rollout,) = drain(engine)[number].rollouts
    np.testing.assert_array_equal(streamed, rollout.tokens)


@pytest.mark.parametrize("failing", [{}, {"hangs": True}, {"kept": 10**6}, {"kept": 0}])
def test_a_watch_that_raises_hangs_or_keeps_too_much_is_counted_and_not_asked_again(
    engine: RolloutEngine, failing: dict[str, Any]
) -> None:
    watch, other = Failing(**failing), Until(10**6)

    def loop(completion: Completion) -> Generator[Command, Any, None]:
        assert (yield Generate(watch=watch if completion.sample == 0 else other)) == "length"

    before = engine.stats().get("watch_failures", 0)
    rollouts = run(engine, loop, samples=2).rollouts
    assert_same(rollouts, engine.generate([request(3, samples=2, stop=WHOLE)]))
    assert watch.calls == 1 and engine.stats()["watch_failures"] == before + 1
    assert other.read == rollouts[1].tokens.tolist()
