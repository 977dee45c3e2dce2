"""Weights that change under way: what each kind of swap means for rollouts, what is refused, and what NaN leaves."""

import dataclasses
import gc
import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from mesh import UserError
from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.commands import Completion, Generate, Wait
from rl.rollout.engine import RolloutEngine, Swap
from rl.rollout.request import Request, StopConditions
from tests.rl.rollout.small import (
    MAX_NEW,
    assert_no_page_is_held,
    assert_same,
    drain,
    make_engine,
    mixed,
    params,
    request,
    scores,
)
from tests.rl.tiny import make_prompt

WHOLE = StopConditions()
OLD, NEW = params(0), params(1)
ASKED = [request(n, samples=2, stop=WHOLE) for n in (5, 3)]  # of 36 and 22 tokens


@pytest.fixture(scope="module")
def one_engine() -> RolloutEngine:
    return make_engine()


@pytest.fixture
def engine(one_engine: RolloutEngine) -> RolloutEngine:
    one_engine.set_weights(OLD, 1, rewind=True)
    return one_engine


@pytest.fixture(scope="module")
def fresh(one_engine: RolloutEngine) -> dict[int, list[Rollout]]:
    """Rollouts of an engine that never had other weights, by version of the weights."""
    found = {}
    for version, weights in ((1, OLD), (2, NEW)):
        one_engine.set_weights(weights, version, rewind=True)
        found[version] = one_engine.generate(ASKED)
    return found


def swapped(engine: RolloutEngine, swap: Swap, turns: int = 2) -> list[Rollout]:
    """ASKED, with new weights after some turns of four tokens."""
    numbers = [engine.submit(q) for q in ASKED]
    for _ in range(turns):
        assert engine.step() == []
    engine.set_weights(NEW, 2, swap=swap)
    finished = drain(engine)
    assert_no_page_is_held(engine)
    return [r for number in numbers for r in finished[number].rollouts]


def pairs(rollouts: list[Rollout]) -> list[Any]:
    return [(q.prompt, r) for q, r in zip([q for q in ASKED for _ in range(2)], rollouts, strict=True)]


# ---- swaps


@pytest.mark.parametrize("swap", ["keep_cache", "recompute"])
def test_each_token_has_the_version_that_drew_it(engine: RolloutEngine, fresh: dict[int, list[Rollout]], swap: Swap):
    rollouts = swapped(engine, swap)
    assert engine.version == 2
    for r, old, new in zip(rollouts, fresh[1], fresh[2], strict=True):
        assert r.versions.tolist() == [1] * 8 + [2] * (MAX_NEW - 8)
        np.testing.assert_array_equal(r.tokens[:8], old.tokens[:8])
        np.testing.assert_array_equal(r.logprobs[:8], old.logprobs[:8])
        assert r.tokens[8:].tolist() not in (old.tokens[8:].tolist(), new.tokens[8:].tolist())
        assert r.tags == (("mixed-cache",) if swap == "keep_cache" else ())


@pytest.mark.numerics
def test_recomputed_keys_and_values_are_those_of_the_new_weights(engine: RolloutEngine):
    rollouts = swapped(engine, "recompute")
    for r, scored in zip(rollouts, scores(NEW, pairs(rollouts)), strict=True):
        np.testing.assert_allclose(r.logprobs[8:], scored[8:], rtol=0, atol=1e-5)


def test_on_a_mixed_cache_they_are_not(engine: RolloutEngine):
    """The test before this one can fail: on a mixed cache the log-probabilities differ."""
    rollouts = swapped(engine, "keep_cache")
    gaps = [np.abs(r.logprobs - s)[8:].max() for r, s in zip(rollouts, scores(NEW, pairs(rollouts)), strict=True)]
    assert min(gaps) > 1e-3


def test_a_swap_before_anything_was_computed_leaves_no_trace(engine: RolloutEngine, fresh: dict[int, list[Rollout]]):
    for swap in ("keep_cache", "recompute", "drain"):
        engine.set_weights(OLD, 1, rewind=True)
        assert_same(swapped(engine, swap, turns=0), fresh[2])


def test_drain_finishes_what_has_begun_and_begins_nothing_else(engine: RolloutEngine, fresh: dict[int, list[Rollout]]):
    first, second = (engine.submit(q) for q in ASKED)
    engine.step()
    engine.set_weights(NEW, 2, swap="drain")
    assert engine.version == 1
    more = [engine.submit(dataclasses.replace(q, priority=1)) for q in ASKED]
    finished = drain(engine)
    assert engine.version == 2
    assert_same([*finished[first].rollouts, *finished[second].rollouts], fresh[1])
    assert_same([*finished[more[0]].rollouts, *finished[more[1]].rollouts], fresh[2])


@pytest.mark.slow
def test_drain_comes_to_an_end_behind_a_long_queue_and_with_few_pages():
    """Waiting requests of higher priority stand in the queue before one that must finish first."""
    engine = make_engine(OLD, 1, pages=12)
    prompt = make_prompt(9, 40)
    engine.generate([Request(prompt, stop=StopConditions(max_new_tokens=1))])  # its prefix is kept
    begun = [engine.submit(q) for q in ASKED]
    engine.step()
    waiting = [engine.submit(Request(prompt, stop=WHOLE, seed=n, priority=1)) for n in range(40)]
    engine.step()
    engine.set_weights(NEW, 2, swap="drain")
    finished = drain(engine)
    assert sorted(finished) == begun + waiting
    found = {number: {int(v) for r in finished[number].rollouts for v in r.versions} for number in finished}
    assert all(found[number] == {1} for number in begun)
    assert {frozenset(found[number]) for number in waiting} <= {frozenset({1}), frozenset({2})}
    assert all(r.tags == () for one in finished.values() for r in one.rollouts)


def test_a_prefix_is_not_used_under_other_weights(engine: RolloutEngine, fresh: dict[int, list[Rollout]]):
    engine.generate(ASKED)
    before = engine.stats()["prefix_cache_hit_tokens"]
    assert engine.stats()["prefix_cache_pages"] > 0
    engine.set_weights(NEW, 2)
    assert engine.stats()["prefix_cache_pages"] == 0
    assert_same(engine.generate(ASKED[:1]), fresh[2][:2])
    assert engine.stats()["prefix_cache_hit_tokens"] == before
    assert_same(engine.generate(ASKED[:1]), fresh[2][:2])
    assert engine.stats()["prefix_cache_hit_tokens"] > before


def test_what_was_drawn_on_a_mixed_cache_is_not_kept(engine: RolloutEngine):
    swapped(engine, "keep_cache")
    assert engine.stats()["prefix_cache_pages"] == 0
    swapped_again = engine.generate(ASKED)
    engine.set_weights(NEW, 2)
    assert_same(engine.generate(ASKED), swapped_again)


def test_a_mixed_cache_that_is_preempted_is_computed_anew_and_kept():
    engine = make_engine(OLD, 1, pages=12, steps_per_dispatch=4)
    numbers = [engine.submit(request(n, samples=2, stop=WHOLE)) for n in (5, 3, 4)]
    engine.step()
    engine.set_weights(NEW, 2)
    finished = drain(engine)
    assert sorted(finished) == numbers and engine.stats()["preemptions"] > 0
    assert_no_page_is_held(engine)
    warm = engine.generate([request(n, samples=2, stop=WHOLE) for n in (5, 3, 4)])
    engine.set_weights(NEW, 2)
    assert_same(warm, engine.generate([request(n, samples=2, stop=WHOLE) for n in (5, 3, 4)]))


# ---- what is refused


def _without(weights: Params, name: str) -> Params:
    return {key: value for key, value in weights.items() if key != name}


def _other_shape(weights: Params) -> Params:
    return {**weights, "norm": jax.tree.map(lambda x: x[:-1], weights["norm"])}


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda w: _without(w, "norm"), "weights: norm.scale is missing"),
        (lambda w: {**w, "extra": {"x": np.zeros(3)}}, "weights: extra.x is not part of the model"),
        (_other_shape, r"weights: norm.scale has shape \(15,\); the model's is \(16,\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_other_arrays_are_refused_by_path_and_the_policy_in_place_stays(
    engine: RolloutEngine, fresh: dict[int, list[Rollout]], change: Callable[[Params], Params], message: str
):
    numbers = [engine.submit(q) for q in ASKED]
    engine.step()
    for swap in ("keep_cache", "recompute", "drain"):
        with pytest.raises(UserError, match=message):
            engine.set_weights(change(NEW), 2, swap=swap)
    finished = drain(engine)
    assert_same([r for number in numbers for r in finished[number].rollouts], fresh[1])


def test_a_lower_version_is_refused_unless_it_is_meant(engine: RolloutEngine, fresh: dict[int, list[Rollout]]):
    engine.set_weights(NEW, 2)
    with pytest.raises(UserError, match="weights of version 1 are older than version 2, which is in place"):
        engine.set_weights(OLD, 1)
    assert_same(engine.generate(ASKED), fresh[2])
    engine.set_weights(OLD, 1, rewind=True)
    assert_same(engine.generate(ASKED), fresh[1])
    number = engine.submit(ASKED[0])
    engine.step()
    engine.set_weights(NEW, 3, swap="drain")
    with pytest.raises(UserError, match="weights of version 2 are older than version 3, which is to come next"):
        engine.set_weights(NEW, 2)
    assert list(drain(engine)) == [number]


def test_a_swap_from_within_a_step_is_refused(engine: RolloutEngine):
    def hears(*told: Any) -> None:
        engine.set_weights(NEW, 2)

    number = engine.submit(ASKED[0], hears)
    assert "set_weights was called within a step" in (drain(engine)[number].error or "")
    assert engine.version == 1


# ---- not a number


def _nan(weights: Params) -> Params:
    return jax.tree.map(lambda x: np.full_like(x, np.nan), weights)


def test_logits_that_are_not_numbers_fail_their_requests_by_name(engine: RolloutEngine):
    engine.set_weights(_nan(OLD), 1)
    numbers = [engine.submit(q) for q in ASKED]
    finished = drain(engine)
    for number, q in zip(numbers, ASKED, strict=True):
        expected = rf"prompt {q.prompt.id} \(chain_sum\), sample 0: the logits for token 0 .* \(weights of version 1\)"
        assert re.match(expected, finished[number].error or "")
        assert [(r.finish_reason, len(r.tokens)) for r in finished[number].rollouts] == [("error", 0)] * 2


@pytest.mark.parametrize("swap", ["keep_cache", "recompute", "drain"])
@pytest.mark.parametrize("leave", ["fail", "abort", "swap"])
def test_nothing_of_what_is_not_a_number_stays_in_any_page(
    engine: RolloutEngine, fresh: dict[int, list[Rollout]], leave: str, swap: Swap
):
    """Neither if the requests failed, nor if they were cut before they drew a token, nor if good weights came."""
    engine.set_weights(_nan(OLD), 1)
    for q in mixed(12):
        engine.submit(dataclasses.replace(q, agent_loop=_suspended) if leave != "fail" else q)
    if leave == "fail":
        drain(engine)
    else:
        for _ in range(3):
            engine.step()
        assert engine.stats()["pages_used"] > 0
    if leave == "abort":
        engine.abort_all()
    engine.set_weights(NEW, 2, swap=swap)
    engine.abort_all()
    drain(engine)
    engine.set_weights(NEW, 2)
    assert_same(engine.generate(ASKED), fresh[2])


def _suspended(completion: Completion) -> Any:
    yield Wait(Future())


def _spoilt(x: jax.Array, rows: np.ndarray) -> jax.Array:
    found = np.array(x)
    found[rows] = np.nan
    return jax.device_put(found, x.sharding)


def test_a_row_that_fails_disturbs_no_other(engine: RolloutEngine, fresh: dict[int, list[Rollout]]):
    """One request's keys and values become no numbers, as a broken memory would have it."""
    good, bad = (engine.submit(q) for q in ASKED)
    engine.step()
    pages = {page for one in engine.lifecycle.groups[bad].sequences for page in one.pages}
    assert pages and not pages & {page for one in engine.lifecycle.groups[good].sequences for page in one.pages}
    rows = np.array([layer * (int(engine.stats()["pages"]) + 1) + page for layer in range(2) for page in pages])
    engine.runner.cache.pool = jax.tree.map(lambda x: _spoilt(x, rows), engine.runner.cache.pool)
    finished = drain(engine)
    assert "the logits for token 4 of its completion are not all numbers" in (finished[bad].error or "")
    for r, expected in zip(finished[bad].rollouts, fresh[1][2:], strict=True):
        np.testing.assert_array_equal(r.tokens, expected.tokens[:4])  # what was drawn before is still there
        assert r.finish_reason == "error" and np.all(np.isfinite(r.logprobs))
    assert_same(finished[good].rollouts, fresh[1][:2])
    assert_same(engine.generate(ASKED), fresh[1])


# ---- pause and abort


def test_a_pause_changes_nothing_but_the_time(engine: RolloutEngine, fresh: dict[int, list[Rollout]]):
    numbers = [engine.submit(ASKED[0])]
    engine.step()
    engine.pause()
    numbers.append(engine.submit(ASKED[1]))
    before = engine.stats()
    assert [engine.step() for _ in range(3)] == [[], [], []]
    assert (
        engine.stats()["generation_tokens"] == before["generation_tokens"]
        and engine.stats()["dispatches"] == before["dispatches"]
    )
    engine.resume()
    finished = drain(engine)
    assert_same([r for number in numbers for r in finished[number].rollouts], fresh[1])


STATES: dict[str, tuple[int, dict[str, Any]]] = {
    "queued": (0, {}),
    "waiting for a row": (3, {"samples": 9}),
    "running": (2, {}),
    "suspended": (2, {"agent_loop": _suspended}),
}


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state_gives_all_samples_and_frees_all_pages(engine: RolloutEngine, state: str, paused: bool):
    turns, fields = STATES[state]
    q = dataclasses.replace(request(5, samples=3, stop=WHOLE), **fields)
    number = engine.submit(q)
    for _ in range(turns):
        engine.step()
    if paused:
        engine.pause()
    engine.abort(number)
    engine.abort(number)  # once is enough
    engine.abort(10**6)  # nobody's
    (finished,) = engine.step()
    engine.resume()
    assert [(r.sample_id, r.finish_reason) for r in finished.rollouts] == [(n, "abort") for n in range(q.samples)]
    assert any(len(r.tokens) for r in finished.rollouts) == (state in ("running", "waiting for a row"))
    assert not engine.busy
    assert_no_page_is_held(engine)


def test_abort_while_the_prompt_is_being_prefilled():
    """A prompt of 39 tokens in chunks of 32, while another request draws."""
    engine = make_engine(OLD, 1, prefills_per_iteration=1)
    engine.submit(request(4, samples=2, stop=WHOLE))
    engine.step()
    number = engine.submit(Request(make_prompt(1, 40), samples=2))
    engine.step()
    assert engine.stats()["waiting"] >= 1
    engine.abort(number)
    finished = drain(engine)
    assert [r.finish_reason for r in finished[number].rollouts] == ["abort", "abort"]
    assert_no_page_is_held(engine)


def test_generation_steps_are_counted(engine: RolloutEngine):
    def two(completion: Completion) -> Any:
        yield Generate(max_new_tokens=1)
        yield Generate(max_new_tokens=1)

    before = engine.stats()["generation_tokens"]
    engine.generate([request(3, samples=2, agent_loop=two, stop=WHOLE)])
    assert engine.stats()["generation_tokens"] - before == 4


def device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_an_engine_that_sleeps_holds_no_memory_and_draws_the_same_when_it_wakes(fresh: dict[int, list[Rollout]]):
    gc.collect()  # of engines of earlier tests
    before = device_bytes()
    engine = make_engine()
    pages = device_bytes() - before
    assert pages > 0
    for version, weights in ((1, OLD), (2, NEW), (1, OLD)):
        engine.set_weights(weights, version, rewind=True)
        assert_same(engine.generate(ASKED), fresh[version])
        assert device_bytes() >= before + pages
        compiled = engine.stats()["compilations"]
        engine.sleep()
        engine.sleep()
        assert device_bytes() == before and engine.version == -1
    assert engine.stats()["compilations"] == compiled
    assert_no_page_is_held(engine)


def test_an_engine_with_unfinished_requests_does_not_sleep(engine: RolloutEngine):
    engine.submit(ASKED[0])
    with pytest.raises(UserError, match="cannot sleep: 1 requests are unfinished"):
        engine.sleep()
    engine.abort_all()
    engine.sleep()
    with pytest.raises(UserError, match="no weights yet; call set_weights first"):
        engine.generate(ASKED)
    engine.set_weights(OLD, 1, rewind=True)
