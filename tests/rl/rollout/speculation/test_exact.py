"""Drafts change no bit: tokens, log-probabilities, versions and finish reasons are those of plain decoding.

An oracle knows what the engine draws without drafts, and is right, wrong, or random.
"""

import dataclasses
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.layers.base import Params
from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.commands import Fork, Generate, Join, Observe, Wait
from rl.rollout.engine import RolloutEngine, Swap
from rl.rollout.request import Request
from rl.rollout.speculation.speculator import Speculation
from tests.rl.rollout.small import VOCAB, assert_no_page_is_held, assert_same, drain, make_engine, mixed, request
from tests.rl.rollout.speculation.oracle import Oracle, oracle
from tests.rl.tiny import tiny_params, tiny_policy

pytestmark = pytest.mark.slow

# Stop tokens and stop strings, groups that share a prompt, prompts of all lengths; one compiled sampler.
REQUESTS = [dataclasses.replace(asked, sampler=None) for asked in mixed(12)]
DRAFTS = Speculation.Config(drafters=(Oracle.Config(),), depth=3, adaptive=False)
WRONG = {"right": 0.0, "half": 0.5, "wrong": 1.0}


@cache
def engine() -> RolloutEngine:
    """One for all: with so few pages, sequences are preempted as soon as some run at a time."""
    policy = tiny_policy(num_layers=1)
    return make_engine(weights(0), model=policy, max_num_seqs=2, steps_per_dispatch=2, speculation=DRAFTS, pages=10)


@cache
def weights(seed: int) -> Params:
    return tiny_params(tiny_policy(num_layers=1), seed)


@cache
def expected() -> list[Rollout]:
    """Rollouts of each request alone, without drafts."""
    return [one for asked in REQUESTS for one in plain().generate([asked])]


def plain() -> RolloutEngine:
    """The engine, with an oracle that knows nothing."""
    oracle(engine()).answers = {}
    return engine()


def drafting(rollouts: list[Rollout], wrong: float = 0.0, seed: int = 0, highest: int = VOCAB) -> RolloutEngine:
    """The engine, with an oracle that knows these rollouts."""
    drafter = oracle(engine())
    drafter.answers = {(one.prompt_id, one.sample_id): one.tokens for one in rollouts}
    drafter.wrong, drafter.highest, drafter.random = wrong, highest, np.random.default_rng(seed)
    return engine()


@pytest.mark.parametrize("wrong", WRONG)
def test_drafts_change_no_bit(wrong: str):
    engine = drafting(expected(), WRONG[wrong])
    before = engine.stats()
    assert_same(engine.generate(REQUESTS), expected())
    assert_no_page_is_held(engine)
    stats = engine.stats()
    drafted, accepted = (stats[name] - before[name] for name in ("drafted_tokens", "accepted_tokens"))
    tokens = sum(len(one.tokens) for one in expected())
    share = accepted / drafted
    if wrong == "right":
        assert share > 0.9 and accepted > tokens / 2
    elif wrong == "half":
        assert 0.1 < share < 0.9
    else:
        assert share < 0.05 and drafted > tokens


def test_an_answers_end_is_no_miss(monkeypatch: pytest.MonkeyPatch):
    """Drafts are right up to the end, and go on behind it, or there is no room for one."""
    engine = drafting(expected())
    drafter, speculation = oracle(engine), engine.speculation
    assert speculation is not None
    behind = np.full(DRAFTS.depth, 1, np.int32)
    drafter.answers = {name: np.concatenate([tokens, behind]) for name, tokens in drafter.answers.items()}
    missed, measured = list[int](), speculation.measured

    def noted(sequences: Any, out: Any) -> None:
        missed.append(int(out["missed"].sum()))
        measured(sequences, out)

    monkeypatch.setattr(speculation, "measured", noted)
    accepted, drafted = engine.stats()["accepted_tokens"], engine.stats()["drafted_tokens"]
    assert_same(engine.generate(REQUESTS), expected())
    assert missed and not any(missed)
    assert engine.stats()["drafted_tokens"] - drafted > engine.stats()["accepted_tokens"] - accepted > 0


@settings(max_examples=8, deadline=None)
@given(
    wrong=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    order=st.permutations(range(len(REQUESTS))),
    turns=st.lists(st.integers(0, 2), min_size=len(REQUESTS), max_size=len(REQUESTS)),
)
def test_any_drafts_at_any_time_change_no_bit(wrong: float, seed: int, order: list[int], turns: list[int]):
    """Requests come in between turns, and preempt each other."""
    engine = drafting(expected(), wrong, seed)
    by_prompt: dict[int, list[Rollout]] = {}
    for one in expected():
        by_prompt.setdefault(one.prompt_id, []).append(one)
    before, numbers, finished = engine.stats()["preemptions"], {}, []
    for index, wait in zip(order, turns, strict=True):
        numbers[engine.submit(REQUESTS[index])] = REQUESTS[index].prompt.id
        for _ in range(wait):
            finished += engine.step()
    for number, one in ({one.number: one for one in finished} | drain(engine)).items():
        assert_same(one.rollouts, by_prompt[numbers[number]])
    assert_no_page_is_held(engine)
    assert engine.stats()["preemptions"] > before


@pytest.mark.parametrize("swap", ["keep_cache", "recompute"])
def test_weights_that_change_in_flight_draw_from_where_they_changed(swap: Swap):
    """The swap comes after as many tokens without drafts as with them, an even number."""
    alone = [request(number, samples=1) for number in range(12)]
    asked, known = max(((one, plain().generate([one])) for one in alone), key=lambda pair: len(pair[1][0].tokens))
    found = swapped(drafting(known), asked, swap, lambda drawn: drawn > 2 and drawn % 2 == 0)
    old = int(np.sum(found[0].versions == 5))
    assert 2 < old < len(known[0].tokens)
    assert_same(found, swapped(plain(), asked, swap, lambda drawn: drawn == old))


def swapped(engine: RolloutEngine, asked: Request, swap: Swap, due: Callable[[int], bool]) -> tuple[Rollout, ...]:
    """Rollouts with other weights from when `due`, by the tokens drawn."""
    number, drawn = engine.submit(asked), 0
    while not due(drawn):
        engine.step()
        drawn = sum(one.drawn for one in engine.scheduler.running)
    engine.set_weights(weights(1), 6, swap=swap)
    output = drain(engine)[number]
    engine.set_weights(weights(0), 5, rewind=True)
    return output.rollouts


def test_agent_loops_get_what_they_would_without_drafts():
    def answer(sample: Any) -> Generator[Any, Any, None]:
        yield Generate(max_new_tokens=2)

    def loop(sample: Any) -> Generator[Any, Any, None]:
        yield Generate(max_new_tokens=5, strings=(chr(0x100 + 9),))
        future: Future[list[int]] = Future()
        future.set_result([5, 6, 7])
        yield Observe((yield Wait(future)))
        yield Generate(max_new_tokens=4)
        copies = yield Fork(answer, (100 + sample.sample,))
        yield Join(tuple(copies))
        yield Generate()

    asked = [dataclasses.replace(request(n), agent_loop=loop) for n in range(4)]
    known = plain().generate(asked)
    assert any(not all(one.action_mask) for one in known)
    engine = drafting(known)
    before = engine.stats()["accepted_tokens"]
    assert_same(engine.generate(asked), known)
    assert engine.stats()["accepted_tokens"] > before


def test_a_drafted_token_that_the_model_cannot_read_spoils_nothing():
    """A token beyond the vocabulary has no embedding but NaN: its sequence goes on without drafts, to the same bits."""
    engine = drafting(expected(), wrong=0.3, highest=3 * VOCAB)
    assert_same(engine.generate(REQUESTS), expected())
    assert engine.stats()["failed"] == 0


def test_weights_that_are_not_numbers_fail_a_request_with_drafts_too():
    engine, asked = drafting(expected()), REQUESTS[3]
    engine.set_weights(jax.tree.map(lambda leaf: leaf * np.float32("nan"), weights(0)), 7)
    number = engine.submit(asked)
    error = drain(engine)[number].error
    assert error is not None and "not all numbers" in error
    engine.set_weights(weights(0), 5, rewind=True)
    assert_same(engine.generate(REQUESTS), expected())


def test_the_drafter_hears_of_every_request_that_ends():
    engine = drafting(expected())
    before = oracle(engine).ended
    engine.generate(REQUESTS[:3])
    number = engine.submit(REQUESTS[3])
    engine.step()
    engine.abort(number)
    engine.step()
    assert oracle(engine).ended - before == 4
    number = engine.submit(REQUESTS[3], lambda *_: engine.abort(number))  # while the device draws
    drain(engine)
    assert oracle(engine).ended - before == 5
    speculation = engine.speculation
    assert speculation is not None and not speculation._records
