"""Earlier rollouts as drafts change no bit: right, diverging, longer, shorter, or nonsense; right ones are kept."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.protocol.messages import Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.speculation.speculator import Speculation
from tests.rl.rollout.small import STOP, VOCAB, assert_no_page_is_held, assert_same, make_engine, mixed, params, request
from tests.rl.tiny import tiny_params, tiny_policy

pytestmark = pytest.mark.slow

REQUESTS = mixed(9)  # stop tokens and strings, samplers with and without tables, groups


@cache
def engine() -> RolloutEngine:
    """One for all: with so few pages, sequences are preempted; it verifies all drafts that there are."""
    policy = tiny_policy(num_layers=1)
    made = make_engine(tiny_params(policy, 0), model=policy, max_num_seqs=3, pages=16)
    made.earlier.adaptive = False
    return made


@cache
def expected() -> list[list[Rollout]]:
    """Rollouts of each request without drafts."""
    return [engine().generate([asked]) for asked in REQUESTS]


def with_earlier(change: Callable[[np.ndarray], np.ndarray]) -> list[Request]:
    """The requests, with what `change` makes of the tokens of each sample."""
    found = zip(REQUESTS, expected(), strict=True)
    return [dataclasses.replace(one, earlier=tuple(change(r.tokens) for r in rollouts)) for one, rollouts in found]


def drawn(engine: RolloutEngine, asked: list[Request]) -> tuple[list[Rollout], dict[str, float]]:
    """Rollouts, and counts that were added."""
    before = dict(engine.earlier.counts)
    rollouts = engine.generate(asked)
    assert_no_page_is_held(engine)
    assert not engine.earlier._places and not engine.earlier._refused
    return rollouts, {name: count - before[name] for name, count in engine.earlier.counts.items()}


def diverging(tokens: np.ndarray) -> np.ndarray:
    """Another token in the middle; then the same again."""
    return np.where(np.arange(len(tokens)) == len(tokens) // 2, (tokens + 1) % VOCAB, tokens)


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "same": lambda tokens: tokens,
    "diverging": diverging,
    "longer": lambda tokens: np.concatenate([tokens, tokens, tokens]),
    "shorter": lambda tokens: tokens[: len(tokens) // 2],
    "none": lambda tokens: tokens[:0],
    "shifted": lambda tokens: np.concatenate([tokens[:2], tokens]),
    "wrong": lambda tokens: (tokens + 1) % VOCAB,
    "outside": lambda tokens: np.where(np.arange(len(tokens)) % 3 == 2, 3 * VOCAB, tokens),
    "negative": lambda tokens: -tokens - 1,
}


@pytest.mark.full
@pytest.mark.parametrize("name", CHANGES)
def test_earlier_rollouts_change_no_bit(name: str):
    flat = [one for rollouts in expected() for one in rollouts]
    found, counts = drawn(engine(), with_earlier(CHANGES[name]))
    assert_same(found, flat)
    drafted, accepted = counts["coupled_drafted_tokens"], counts["coupled_accepted_tokens"]
    if name in ("same", "longer"):
        assert drafted > 40 and accepted > 0.8 * drafted
    elif name in ("wrong",):
        assert drafted > 40 and accepted < 0.1 * drafted
    elif name in ("none", "negative"):
        assert not drafted
    else:
        assert accepted > 5


def test_a_draft_goes_on_behind_a_token_that_was_replaced():
    asked = dataclasses.replace(request(5), stop=StopConditions(max_new_tokens=24), samples=2)
    known = engine().generate([asked])
    found, counts = drawn(engine(), [dataclasses.replace(asked, earlier=tuple(diverging(r.tokens) for r in known))])
    assert_same(found, known)
    assert [len(one.tokens) for one in known] == [24, 24]
    assert counts["coupled_dispatches"] <= 4 and counts["coupled_accepted_tokens"] >= 2 * (24 - 4)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(len(REQUESTS))))
def test_any_earlier_rollouts_change_no_bit(seed: int, order: list[int]):
    random = np.random.default_rng(seed)

    def change(tokens: np.ndarray) -> np.ndarray:
        first, end = random.integers(0, len(tokens) + 1, 2)
        garbage = random.integers(-2, VOCAB + 2, random.integers(0, 30))
        return np.concatenate([tokens[:first], garbage, tokens[end:]])

    asked = with_earlier(change)
    found, _ = drawn(engine(), [asked[n] for n in order])
    assert_same(found, [one for n in order for one in expected()[n]])


def test_earlier_rollouts_of_few_samples_and_of_more():
    for count in (1, 5):
        earlier = [tuple((one.earlier * 5)[:count]) for one in with_earlier(lambda tokens: tokens)]
        asked = [dataclasses.replace(one, earlier=known) for one, known in zip(REQUESTS, earlier, strict=True)]
        assert_same(drawn(engine(), asked)[0], [one for rollouts in expected() for one in rollouts])


@pytest.mark.full
def test_a_neighbouring_policy_draws_mostly_the_same_and_other_keys_do_not():
    """Weights with a little noise: with the same keys much of the earlier rollout is kept, with others little."""
    old, long = engine().runner.params, StopConditions()
    asked = [dataclasses.replace(request(n), stop=long, samples=3) for n in range(4)]
    known = [engine().generate([one]) for one in asked]

    def near(leaf: Any) -> Any:
        return leaf + 0.01 * np.std(leaf) * np.random.default_rng(1).standard_normal(leaf.shape).astype(np.float32)

    coupled = [
        dataclasses.replace(one, earlier=tuple(r.tokens for r in rollouts))
        for one, rollouts in zip(asked, known, strict=True)
    ]
    engine().set_weights(jax.tree.map(near, tiny_params(tiny_policy(num_layers=1), 0)), 6)
    try:
        plain = engine().generate(asked)
        found, counts = drawn(engine(), coupled)
        assert_same(found, plain)
        others = engine().generate([dataclasses.replace(one, seed=one.seed + 1) for one in asked])
        other, fresh = drawn(engine(), [dataclasses.replace(one, seed=one.seed + 1) for one in coupled])
        assert_same(other, others)
    finally:
        assert old is not None
        engine().set_weights(tiny_params(tiny_policy(num_layers=1), 0), 5, rewind=True)
    shares = [one["coupled_accepted_tokens"] / one["coupled_drafted_tokens"] for one in (counts, fresh)]
    assert shares[0] > 0.7 and shares[1] < 0.2


def test_partial_rollouts_go_on_with_drafts_behind_them():
    asked = dataclasses.replace(request(5), stop=StopConditions())
    whole = engine().generate([asked])
    cut = [
        dataclasses.replace(
            one,
            tokens=one.tokens[:7],
            logprobs=one.logprobs[:7],
            versions=one.versions[:7],
            action_mask=one.action_mask[:7],
            finish_reason="abort",
        )  # fmt: skip
        for one in whole
    ]
    again = dataclasses.replace(asked, partial=tuple(cut), earlier=tuple(one.tokens for one in whole))
    found, counts = drawn(engine(), [again])
    assert_same(found, whole)
    assert counts["coupled_accepted_tokens"] > 10


@pytest.mark.full
def test_beside_other_drafts_and_other_rules():
    """Speculation too, greedy draws, and several chunks of a long answer."""
    policy = tiny_policy(num_layers=1)
    sizes = {"model": policy, "max_new_tokens": 80, "speculation": Speculation.Config(text=64)}
    both = make_engine(tiny_params(policy, 0), **sizes)
    both.earlier.adaptive = False
    rules = [Sampler.Config(temperature=0.0), Sampler.Config(top_k=20, top_p=0.9), None]
    asked = [dataclasses.replace(request(n + 1), sampler=rules[n], stop=StopConditions(STOP[:1])) for n in range(3)]
    known = [both.generate([one]) for one in asked]
    assert max(len(one.tokens) for rollouts in known for one in rollouts) > 64
    again = [
        dataclasses.replace(one, earlier=tuple(diverging(r.tokens) for r in rollouts))
        for one, rollouts in zip(asked, known, strict=True)
    ]
    found, counts = drawn(both, again)
    assert_same(found, [one for rollouts in known for one in rollouts])
    assert counts["coupled_accepted_tokens"] > 50


def test_weights_that_are_not_numbers_fail_a_request_with_earlier_rollouts_too():
    asked = with_earlier(lambda tokens: tokens)[3]
    engine().set_weights(jax.tree.map(lambda leaf: leaf * np.float32("nan"), params_of_engine()), 7)
    number = engine().submit(asked)
    outputs = {}
    while engine().busy:
        outputs |= {one.number: one for one in engine().step()}
    engine().set_weights(params_of_engine(), 5, rewind=True)
    error = outputs[number].error
    assert error is not None and "not all numbers" in error


def params_of_engine() -> Any:
    return tiny_params(tiny_policy(num_layers=1), 0)


def test_dispatches_that_cost_more_than_decoding_are_not_made_but_tried():
    """Decoding of 8 rows takes 1 ms a step, verifying 100 ms a dispatch, and later 0.1 ms."""
    fresh = make_engine(params())
    earlier, asked = fresh.earlier, dataclasses.replace(request(5), stop=StopConditions())
    known = fresh.generate([asked])
    number = fresh.submit(asked)
    fresh.step()
    group = fresh.lifecycle.groups[number]
    group.request = dataclasses.replace(asked, earlier=tuple(one.tokens for one in known))
    rows = dict.fromkeys(fresh.scheduler.running, 32)
    earlier._decoding.clear()
    earlier._redraws.clear()
    assert not earlier.choose(rows, 8)  # nothing is known of decoding
    earlier.decoded(8, 80, 0.01)
    (first,) = earlier.choose(rows, 8)
    for chunk in (8, 16, 32):
        costly = dataclasses.replace(first, shape=(first.shape[0], chunk))
        earlier.measured(costly, [draft[:3] for draft in first.drafts], 0.1)
    tries = [len(earlier.choose(rows, 8)) for _ in range(60)]
    assert 2 <= sum(tries) <= 5
    for _ in range(100):
        earlier.measured(costly, [draft[:9] for draft in first.drafts], 0.0001)
    assert all(len(earlier.choose(rows, 8)) == 1 for _ in range(20))
    fresh.abort(number)
