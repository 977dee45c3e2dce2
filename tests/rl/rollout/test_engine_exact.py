"""Tokens and log-probabilities depend on the request and the weights alone: to the bit, in float32 on a CPU.

Not on batch, order, number of rows, page size, chunks, steps per dispatch, preemption, kept prefixes, or an abort in
between.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axlearn_like.layers.base import build_abstract, split
from rl.protocol.messages import Group, Prompt, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.training.program import make_score_rows
from tests.rl.rollout.small import (
    MAX_NEW,
    MAX_PROMPT,
    TEMPERATURE,
    assert_no_page_is_held,
    assert_same,
    drain,
    make_engine,
    mixed,
    params,
    request,
    scores,
)
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy
from tests.rl.training.whole_groups import pack_rows

REQUESTS = mixed(16)
# Eleven pages hold one of three sequences of full length that may run, and a bit.
ENGINES: dict[str, dict[str, Any]] = {
    "usual": {},
    "few pages": {"pages": 12},
    "few pages, none kept": {"pages": 12, "enable_prefix_caching": False},
    "one slot, one step": {"max_num_seqs": 1, "steps_per_dispatch": 1, "page_size": 1},
    "other sizes": {"max_num_seqs": 9, "page_size": 32, "steps_per_dispatch": 7, "prefill_tokens": 128},
}
EVERY_RUN = ("usual", "few pages, none kept")  # the others are compiled with --full
_made: dict[str, RolloutEngine] = {}


def engine_of(name: str) -> RolloutEngine:
    """Compiled once."""
    if name not in _made:
        _made[name] = make_engine(**ENGINES[name])
    return _made[name]


@pytest.fixture(scope="module")
def alone() -> dict[int, list[Rollout]]:
    """Rollouts of each request when it runs alone, by prompt id."""
    return {q.prompt.id: engine_of("usual").generate([q]) for q in REQUESTS}


def expected(alone: dict[int, list[Rollout]], requests: list[Request]) -> list[Rollout]:
    return [r for q in requests for r in alone[q.prompt.id]]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n not in EVERY_RUN)) for n in ENGINES])
def test_any_engine_gives_the_same_bits(alone: dict[int, list[Rollout]], name: str):
    engine = engine_of(name)
    assert_same(engine.generate(REQUESTS), expected(alone, REQUESTS))
    assert_same(engine.generate(REQUESTS[::-1]), expected(alone, REQUESTS[::-1]))
    assert_no_page_is_held(engine)
    assert (engine.stats()["preemptions"] > 0) == ("few pages" in name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [pytest.param(EVERY_RUN, id="two"), pytest.param(tuple(ENGINES), id="all", marks=pytest.mark.full)]
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    chosen=st.lists(st.sampled_from(range(len(REQUESTS))), min_size=1, max_size=12),
    turns=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    priorities=st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_any_mix_at_any_time_gives_the_same_bits(
    alone: dict[int, list[Rollout]],
    names: tuple[str, ...],
    data: st.DataObject,
    chosen: list[int],
    turns: list[int],
    priorities: list[int],
):
    """Requests come in between turns, with priorities that lead to preemption in other orders."""
    engine = engine_of(data.draw(st.sampled_from(names)))
    numbers, finished = [], []
    for index, wait, priority in zip(chosen, turns, priorities, strict=False):
        numbers.append(engine.submit(dataclasses.replace(REQUESTS[index], priority=priority)))
        for _ in range(wait):
            finished += engine.step()
    by_number = {one.number: one for one in finished} | drain(engine)
    for number, index in zip(numbers, chosen, strict=True):
        assert_same(by_number[number].rollouts, alone[REQUESTS[index].prompt.id])
    assert_no_page_is_held(engine)


@pytest.mark.slow
def test_samples_that_share_a_prompt_are_each_as_if_asked_for_alone(alone: dict[int, list[Rollout]]):
    """A rollout with no tokens yet stands for one sample: its prompt is prefilled on its own."""
    engine = engine_of("usual")
    for q in REQUESTS[:8]:
        for sample, r in enumerate(alone[q.prompt.id]):
            empty = _cut(r, 0)
            assert_same(engine.generate([dataclasses.replace(q, partial=(empty,))]), [r])
            assert r.sample_id == sample


def _cut(rollout: Rollout, length: int) -> Rollout:
    records = {name: getattr(rollout, name)[:length] for name in ("tokens", "logprobs", "versions", "action_mask")}
    return dataclasses.replace(rollout, **records, finish_reason="abort")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["few pages", pytest.param("usual", marks=pytest.mark.full)])
@pytest.mark.parametrize("turns", [1, 5, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 2, 3))])
def test_after_an_abort_partial_rollouts_go_on_with_the_same_bits(
    alone: dict[int, list[Rollout]], name: str, turns: int
):
    engine = engine_of(name)
    asked = REQUESTS[:10]
    numbers = {engine.submit(q): q for q in asked}
    finished = [one for _ in range(turns) for one in engine.step()] + engine.abort_all()
    assert sorted(one.number for one in finished) == sorted(numbers)
    assert_no_page_is_held(engine)
    again = [dataclasses.replace(numbers[one.number], partial=one.rollouts) for one in finished]
    lengths = {len(r.tokens) for q in again for r in q.partial if r.finish_reason == "abort"}
    assert len(lengths) > 1 or turns == 0  # some were cut in the middle
    assert_same(engine_of("usual" if name == "few pages" else "other sizes").generate(again), expected(alone, again))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["usual", pytest.param("few pages", marks=pytest.mark.full)])
def test_turns_of_a_dialogue_reuse_pages_and_change_no_bit(name: str):
    engine, cold = engine_of(name), engine_of("few pages, none kept")
    before = engine.stats()["prefix_cache_hit_tokens"]
    tokens = make_prompt(5, 9).tokens
    for turn in range(3):
        q = Request(Prompt(50 + turn, "chat", tokens), seed=3, stop=StopConditions(max_new_tokens=10))
        (found,), (fresh,) = engine.generate([q]), cold.generate([q])
        assert_same([found], [fresh])
        tokens = np.concatenate([tokens, found.tokens, np.array([7, 8], np.int32)])[:MAX_PROMPT]
    assert engine.stats()["prefix_cache_hit_tokens"] - before >= 8 + 16
    assert cold.stats()["prefix_cache_hit_tokens"] == 0


@pytest.mark.slow
def test_the_samples_of_a_request_prefill_its_prompt_once_and_share_its_pages():
    engine = engine_of("few pages, none kept")
    before = engine.stats()["prefill_tokens"]
    engine.submit(Request(make_prompt(1, 40), samples=3, stop=StopConditions(max_new_tokens=8)))
    engine.step()
    stats = engine.stats()
    assert (stats["prefill_tokens"] - before, stats["running"]) == (39, 3)
    # 39 tokens of the prompt and 4 of each sample: four full pages are shared, and each sample has a fifth and a sixth.
    assert stats["pages_used"] == 4 + 3 * 2
    drain(engine)
    assert engine.stats()["pages_used"] == 0


@pytest.mark.parametrize("temperature", [0.8, pytest.param(1.0, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["usual", pytest.param("other sizes", marks=pytest.mark.full)])
def test_a_plain_scoring_pass_gives_the_engines_log_probabilities_to_the_bit(name: str, temperature: float):
    engine = engine_of(name)
    sampler = engine.cfg.sampler.clone(temperature=temperature)
    asked = [request(n, samples=4, sampler=sampler) for n in range(12)]
    rollouts = engine.generate(asked)
    prompts = [q.prompt for q in asked for _ in range(4)]
    for r, scored in zip(
        rollouts, scores(params(), list(zip(prompts, rollouts, strict=True)), temperature), strict=True
    ):
        np.testing.assert_array_equal(r.logprobs, scored)
    assert sum(len(r.tokens) for r in rollouts) > 300


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [lambda e: None, lambda e: e.generate(REQUESTS[:3])], ids=["cold", "warm"])
def test_many_samples_on_few_slots_all_come_to_an_end(prepare: Callable[[RolloutEngine], Any]):
    engine = engine_of("few pages")
    prepare(engine)
    q = request(5, samples=40)
    assert [r.sample_id for r in engine.generate([q, request(6, samples=1)])] == [*range(40), 0]
    assert_no_page_is_held(engine)
    assert max(len(r.tokens) for r in engine.generate([q])) <= MAX_NEW


@pytest.mark.full
@pytest.mark.parametrize("prefill_tokens", [64, 512])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_prompts_of_all_lengths_are_scored_to_the_bit(kv_heads: int, max_num_seqs: int, prefill_tokens: int):
    """The demo's shape, prompts that end in, at and behind a block of keys, prefilled a row at a time and together."""
    assert_scored(3, kv_heads, samples=1, max_num_seqs=max_num_seqs, prefill_tokens=prefill_tokens)


@pytest.mark.full
def test_steps_of_many_rows_are_scored_to_the_bit():
    """Steps of 64 rows multiply with the matrices of queries, keys and values together (grouped_query.py)."""
    assert_scored(4, 2, samples=7, max_num_seqs=64)


def assert_scored(heads: int, kv_heads: int, *, samples: int, **sizes: Any) -> None:
    """Sample completions of prompts of many lengths, and compare their log-probabilities with a scoring pass."""
    policy: Any = tiny_policy(num_layers=2)
    policy.block.attention.set(num_heads=heads, num_kv_heads=kv_heads, head_dim=32)
    policy.block.feed_forward.set(hidden=256)
    policy.set(dim=96)
    weights = tiny_params(policy)
    engine = make_engine(weights, model=policy, max_prompt_tokens=200, page_size=16, **sizes)
    lengths = (34, 64, 65, 66, 90, 96, 97, 128, 129, 200)
    asked = [
        Request(make_prompt(number, length), samples=samples, seed=3, stop=StopConditions(max_new_tokens=20))
        for number, length in enumerate(lengths)
    ]
    rollouts = engine.generate(asked)
    graphdef, _ = split(build_abstract(policy))
    prompts = {q.prompt.id: q.prompt for q in asked}
    rows = pack_rows(
        [Group(prompts[r.prompt_id], (r,), ()) for r in rollouts], max_prompt_tokens=200, max_new_tokens=24
    )
    parts = make_score_rows(graphdef)(
        weights, tokens=rows["tokens"], targets=rows["targets"], temperature=np.array([TEMPERATURE], np.float32)
    )
    for rollout, scored, first in zip(rollouts, parts.logprobs(), rows["first"], strict=True):
        assert scored[first : first + len(rollout.tokens)].tobytes() == rollout.logprobs.tobytes(), first + 1
