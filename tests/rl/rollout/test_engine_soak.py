"""Requests of all kinds with aborts, pauses and weight swaps at random: each is accounted for once, no page is lost."""

import functools
import random
from collections import Counter
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.commands import Completion, Fork, Generate, Join, Observe, Wait, single_turn
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, RequestOutput, StopConditions
from tests.rl.rollout.small import (
    MAX_NEW,
    MAX_PROMPT,
    PLAIN,
    RULES,
    STOP,
    assert_no_page_is_held,
    assert_same,
    make_engine,
    params,
    request,
    text,
)
from tests.rl.tiny import make_prompt

weights = functools.cache(params)
SWAPS = ("keep_cache", "recompute", "drain")


class Soak:
    """One engine, a stream of random requests, and what became of each."""

    def __init__(self, seed: int, **sizes: Any):
        self.random = random.Random(seed)
        self.engine: RolloutEngine = make_engine(weights(0), 0, **sizes)
        self.asked: dict[int, Request] = {}
        self.told: dict[int, dict[int, list[int]]] = {}
        self.finished: dict[int, RequestOutput] = {}
        self.futures: list[Future[list[int]]] = []
        self.version = 0

    # ---- requests

    def request(self) -> Request:
        pick, number = self.random, self.random.randrange(1 << 40)
        start = make_prompt(pick.randrange(6), MAX_PROMPT).tokens  # prompts begin alike
        prompt = make_prompt(number, pick.randint(1, MAX_PROMPT))
        common = pick.choice((0, 0, 9, 30))
        prompt.tokens[:common] = start[: min(common, len(prompt.tokens))]
        strings = pick.choice(((), (), (text([pick.randrange(256)]),)))
        return Request(
            prompt,
            samples=pick.choice((1, 1, 2, 3, 8)),
            seed=pick.randrange(9),
            sampler=pick.choice((None, None, RULES)),
            stop=pick.choice((None, PLAIN, StopConditions(STOP, strings, pick.randint(1, MAX_NEW)))),
            deadline=pick.choice((None,) * 9 + (0.001,)),
            priority=pick.choice((0, 0, 0, 1, -1)),
            agent_loop=pick.choice((single_turn, single_turn, single_turn, self.tool, self.forks, _raises)),
        )

    def tool(self, completion: Completion) -> Any:
        for _ in range(4):
            if (yield Generate(max_new_tokens=3)) == "stop":
                return
            future: Future[list[int]] = Future()
            self.futures.append(future)
            yield Observe((yield Wait(future)))

    def forks(self, completion: Completion) -> Any:
        yield Generate(max_new_tokens=2)
        completions = yield Fork(single_turn, (completion.sample + 100, completion.sample + 200))
        if completion.sample % 2:
            yield Join(tuple(completions))
        yield Generate()

    def submit(self) -> None:
        asked = self.request()
        told: dict[int, list[int]] = {}

        def hears(sample: int, tokens: np.ndarray, logprobs: np.ndarray, _: Any) -> None:
            assert len(tokens) == len(logprobs)
            told.setdefault(sample, []).extend(tokens.tolist())

        number = self.engine.submit(asked, hears)
        assert number not in self.asked
        self.asked[number], self.told[number] = asked, told

    # ---- events

    def turn(self) -> None:
        for one in self.engine.step():
            assert one.number not in self.finished
            self.finished[one.number] = one

    def event(self) -> None:
        pick = self.random
        match pick.randrange(12):
            case 0:
                self.engine.abort(pick.choice(list(self.asked)))
            case 1:
                self.engine.pause()
                self.turn()
                self.engine.resume()
            case 2:
                self.version += 1
                swap: Any = pick.choice(SWAPS)
                self.engine.set_weights(weights(self.version % 3), self.version, swap=swap)
            case _:
                self.turn()
        for future in self.futures[: pick.randint(0, 20)]:
            self.futures.remove(future)
            future.set_result([pick.randrange(256)] * pick.randrange(4))

    def run(self, count: int, at_once: int) -> None:
        while len(self.asked) < count:
            while len(self.asked) - len(self.finished) < at_once and len(self.asked) < count:
                self.submit()
            self.event()
        while self.engine.busy:
            self.event()


def _raises(completion: Completion) -> Any:
    yield Generate(max_new_tokens=2)
    raise ValueError("as some tools do")


def _check(q: Request, one: RequestOutput, told: dict[int, list[int]]) -> None:
    ids = [r.sample_id for r in one.rollouts]
    assert ids == sorted(set(ids)) and set(range(q.samples)) <= set(ids)
    assert (one.error is not None) == (q.agent_loop is _raises and "error" in {r.finish_reason for r in one.rollouts})
    for r in one.rollouts:
        _check_rollout(q, r)
        assert told.get(r.sample_id, []) == r.tokens.tolist() or r.sample_id >= 100  # a fork hears only when it draws


def _check_rollout(q: Request, r: Rollout) -> None:
    most = MAX_NEW if q.stop is None or q.stop.max_new_tokens is None else q.stop.max_new_tokens
    assert r.prompt_id == q.prompt.id and len(r.tokens) <= most
    assert len(r.tokens) == len(r.logprobs) == len(r.versions) == len(r.action_mask)
    assert np.all(np.isfinite(r.logprobs)) and np.all((r.logprobs <= 0) & (r.action_mask | (r.logprobs == 0)))
    assert np.all(np.diff(r.versions) >= 0)
    if "mixed-cache" in r.tags and len(r.tokens):
        assert q.agent_loop is not single_turn or r.versions[-1] > 0


def soak(count: int, seed: int, **sizes: Any) -> Soak:
    world = Soak(seed, **sizes)
    world.run(count, at_once=12)
    assert sorted(world.finished) == list(range(count)) == sorted(world.asked)
    for number, q in world.asked.items():
        _check(q, world.finished[number], world.told[number])
    assert_no_page_is_held(world.engine)
    world.engine.set_weights(weights(0), world.version + 1)  # drops the prefixes
    assert world.engine.stats()["pages_used"] == 0
    fresh = [request(n) for n in range(3)]
    again = make_engine(weights(0), world.version + 1, **sizes)
    assert_same(world.engine.generate(fresh), again.generate(fresh))
    reasons = Counter(r.finish_reason for one in world.finished.values() for r in one.rollouts)
    assert set(reasons) == {"stop", "length", "abort", "deadline", "error"}
    stats = world.engine.stats()
    assert min(stats[name] for name in ("preemptions", "prefix_cache_hit_tokens", "aborted", "failed")) > 0
    return world


@pytest.mark.full  # test_engine_exact.py has any mix at any time
def test_a_hundred_requests():
    soak(100, seed=1, pages=12)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_requests(seed: int):
    """Five hundred each time: a test of more than four minutes would be taken for one that hangs."""
    soak(500, seed=100 + seed, pages=12 if seed % 2 else 20)
