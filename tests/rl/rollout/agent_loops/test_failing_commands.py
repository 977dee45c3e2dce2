"""Agent loops, callbacks and steps that fail: their request does, by name, and nothing else."""

import re
from typing import Any

import pytest

from rl.rollout.agent_loops.commands import AgentLoop, Completion, Fork, Generate, Join, Observe
from rl.rollout.engine import RolloutEngine
from tests.rl.rollout.agent_loops.loops import WHOLE, Commands, commands, run
from tests.rl.rollout.small import assert_same, drain, request


def _raises(completion: Completion) -> Commands:
    yield Generate(max_new_tokens=3)
    if completion.sample == 1:
        raise ValueError("no such tool")
    yield Generate()


def _raises_at_once(completion: Completion) -> Commands:
    raise ValueError("no such tool")
    yield Generate()


def _no_generator(completion: Completion) -> Any:
    return 3


def _yields_rubbish(completion: Completion) -> Any:
    yield 3


def _fork_raises(completion: Completion) -> Commands:
    yield Generate(max_new_tokens=2)
    yield Fork(_raises_at_once, (50, 51))
    yield Generate()


def _joins_itself(completion: Completion) -> Commands:
    yield Join((completion,))


WRONG: list[tuple[str, AgentLoop, str]] = [
    ("raises", _raises, "sample 1: ValueError.'no such tool'"),
    ("raises at once", _raises_at_once, "sample 0: ValueError.'no such tool'"),
    ("a fork raises", _fork_raises, "sample 50: ValueError.'no such tool'"),
    ("no generator", _no_generator, "sample 0: AttributeError"),
    ("no step", _yields_rubbish, "sample 0: UserError.*yielded 3; expected Generate"),
    ("token", commands(Observe((3, 272))), "sample 0: UserError.*observes token 272; the vocabulary is 0 to 271"),
    ("taken id", commands(Fork(_raises, (0,))), "sample 0: UserError.*forks to sample 0; its draws need an id"),
    ("id twice", commands(Fork(_raises, (8, 8))), "sample 0: UserError.*forks to sample 8; its draws need an id"),
    ("negative id", commands(Fork(_raises, (-2,))), "sample 0: UserError.*forks to sample -2"),
    ("stop string", commands(Generate(strings=("",))), "sample 0: UserError.*stop string ''"),
    ("joins itself", _joins_itself, "sample 0: UserError.*joins itself"),
]


@pytest.mark.parametrize("samples", [2, 6])
@pytest.mark.parametrize("agent_loop,message", [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_program_that_fails_fails_its_request_alone(
    engine: RolloutEngine, agent_loop: AgentLoop, message: str, samples: int
):
    before = engine.stats()["failed"]
    other = engine.submit(request(4))
    number = engine.submit(request(3, samples=samples, stop=WHOLE, agent_loop=agent_loop))
    finished = drain(engine)
    assert_same(finished[other].rollouts, engine.generate([request(4)]))
    assert re.search(rf"^prompt 3 \(chain_sum\), {message}", finished[number].error or "")
    assert all(r.finish_reason == "error" for r in finished[number].rollouts)
    assert engine.stats()["failed"] == before + 1


def test_a_program_that_refuses_to_end_does_not_hold_its_request(engine: RolloutEngine):
    def stubborn(completion: Completion) -> Commands:
        try:
            yield Generate()
        finally:
            yield Generate()

    number = engine.submit(request(3, samples=2, stop=WHOLE, agent_loop=stubborn))
    engine.step()
    engine.abort(number)
    finished = drain(engine)[number]
    assert [r.finish_reason for r in finished.rollouts] == ["abort", "abort"]
    assert "when ended: RuntimeError" in (finished.error or "")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_callback_that_raises_fails_its_request_alone(engine: RolloutEngine, after: int):
    told: list[int] = []

    def hears(sample: int, *_: Any) -> None:
        told.append(sample)
        if len(told) > after:
            raise ConnectionError("gone")

    other = engine.submit(request(4))
    number = engine.submit(request(3, samples=3, stop=WHOLE), hears)
    finished = drain(engine)
    assert len(told) <= after + 3  # those of one turn
    assert "on_tokens raised ConnectionError('gone')" in (finished[number].error or "")
    assert_same(finished[other].rollouts, engine.generate([request(4)]))


def test_a_callback_may_abort_its_own_request_and_others(engine: RolloutEngine):
    """The device is drawing for them at that moment."""
    numbers: list[int] = []

    def hears(sample: int, *_: Any) -> None:
        for number in numbers[:2]:
            engine.abort(number)

    numbers += [engine.submit(request(3, samples=2, stop=WHOLE), hears)]
    numbers += [engine.submit(request(n, samples=2, stop=WHOLE)) for n in (4, 5)]
    finished = drain(engine)
    assert sorted(finished) == numbers
    assert [f.rollouts[0].finish_reason for f in (finished[n] for n in numbers)] == ["abort", "abort", "length"]
    assert_same(finished[numbers[2]].rollouts, engine.generate([request(5, samples=2, stop=WHOLE)]))


def test_a_step_within_a_step_is_refused(engine: RolloutEngine):
    def nested(completion: Completion) -> Commands:
        engine.step()
        yield Generate()

    assert "step was called within a step" in (run(engine, nested, samples=2).error or "")
