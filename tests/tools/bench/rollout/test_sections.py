"""The sections of `axl bench rollout` on tiny jobs, with the real engine: what is counted, not how long it takes."""

import itertools
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import pytest

from rl.rollout.agent_loops.commands import Generate, Wait
from tools.bench.harness.protocol import Clock
from tools.bench.rollout.sections import host, long_tail
from tools.bench.rollout.sections.bed import Bed, Compilations
from tools.bench.rollout.sections.drive import Spent, Watch, closed_loop, run_queue

BED = Bed(quick=True)


def test_lengths_have_the_tail_that_is_stated_and_are_the_same_every_time() -> None:
    tail = long_tail.Tail()
    lengths = tail.lengths()
    assert lengths == long_tail.Tail().lengths() and len(lengths) == 256
    assert min(lengths) == 16 and max(lengths) == 512  # clipped at both ends
    assert sorted(lengths)[128] == pytest.approx(96, rel=0.15)
    # Otherwise the longest request alone would take longer than the bound says for all.
    assert sum(lengths) / tail.max_num_seqs > max(lengths)


def test_bounds_are_full_steps_for_all_needed_tokens_and_each_token_at_its_own_context() -> None:
    ways = {"plain_static": Spent(12.0, 13.0, 6), **{way: Spent(2.0, 2.5, 2) for way in long_tail.CONTINUOUS}}
    ways["compacting_static"] = Spent(9.0, 9.0, 6)
    by_position = [0.5, 0.25, 0.15]  # 0.3 on average, so 0.6 for a step of two rows
    found = long_tail.figures(ways, {"plain_static": 1.5}, by_position, [1, 2, 3], max_num_seqs=2)
    plain, steady = found["ways"]["plain_static"], found["ways"]["steady"]
    assert plain["over_bound"] == pytest.approx(12 / (6 / 2 * 0.6)) and plain["row_steps_per_token"] == 1.5
    assert plain["over_uniform_bound"] == pytest.approx(12 / (0.5 + 0.75 + 0.9))
    assert steady["over_bound"] == pytest.approx(6 / 1.8) and steady["row_steps_per_token"] is None
    assert found["plain_static"]["fifo"] == pytest.approx(2.0)
    assert found["compacting_static"]["steady"] == pytest.approx(1.5)


@pytest.mark.full
def test_long_tail_draws_what_is_needed_in_every_way() -> None:
    result = long_tail.measure(quick=True)
    tail = result["long_tail"]
    for what in ("static", "compacting_static"):
        assert set(result[f"continuous_over_{what}"]) == {"fifo", "longest_first", "steady"}
    row_steps = {way: tail["ways"][way]["row_steps_per_token"] for way in tail["ways"]}
    for way in ("plain_static", "compacting_static", "compacting_static_longest_first", "fifo", "longest_first"):
        assert tail["ways"][way]["tokens"] == tail["needed_tokens"]
        assert row_steps[way] >= 1
    # Eight rows are the fewest there are, so there is nothing to give up.
    assert row_steps["fifo"] < row_steps["compacting_static"] == row_steps["plain_static"]
    lengths, rows = long_tail.Tail(median=12, shortest=4, longest=40, requests=24, max_num_seqs=8).lengths(), 8
    whole = sum(rows * max(lengths[first : first + rows]) for first in range(0, len(lengths), rows))
    assert row_steps["plain_static"] == pytest.approx(whole / sum(lengths))
    assert tail["uniform_bound_cpu_s"] > 0 and tail["bound_cpu_s"] > 0
    assert result["warm_compiles"] == 0


@pytest.mark.full
def test_batches_of_a_queue_follow_one_another_and_dispatches_are_counted() -> None:
    engine = BED.engine(max_num_seqs=4, max_prompt_tokens=8, max_new_tokens=8, steps_per_dispatch=4)
    with Watch(engine, timed=True) as watch:
        spent = run_queue(engine, BED.requests([8, 2], prompt_tokens=8), BED.requests([1, 8], prompt_tokens=8))
    assert spent.tokens == 19
    assert [one.sequences for one in watch.decodes] == [2, 1, 2, 1]  # never three at a time
    assert [one.steps for one in watch.decodes] == [4, 4, 4, 4]
    assert all(isinstance(one.took, Clock) for one in watch.decodes)
    assert watch.prefills == 2
    engine.generate(BED.requests([4], prompt_tokens=8))
    assert len(watch.decodes) == 4  # it no longer looks


@pytest.mark.full
def test_closed_loop_counts_its_window_and_leaves_others_alone() -> None:
    def wait(completion: object):
        yield Generate()
        yield Wait(Future())

    engine = BED.engine(max_num_seqs=4, max_prompt_tokens=8, max_new_tokens=8, steps_per_dispatch=4)
    held = engine.submit(BED.request(2, prompt_tokens=8, agent_loop=wait))
    while not engine.stats()["suspended"]:
        engine.step()
    requests = (BED.request(length, prompt_tokens=8) for length in itertools.cycle([2, 7]))
    spent = closed_loop(engine, requests, concurrent=6, warm=4, count=10)
    assert 0 < spent.tokens < engine.stats()["generation_tokens"]  # the start is not in it
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["suspended"]) == (0, 0, 1)
    assert [one.number for one in engine.abort_all()] == [held]


def test_host_time_counts_its_work() -> None:
    figures = host.measure(quick=True)
    assert figures["host"]["tokens"] == BED.job.new_tokens_per_step
    assert figures["host"]["decodes"] == figures["host"]["prefills"] == 1
    assert figures["host_ms_per_dispatch"] > 0
    assert figures["warm_compiles"] == 0


def test_compilations_of_anything_are_counted_once() -> None:
    double = jax.jit(lambda x: x * 2 + 0.125)
    count = Compilations()
    value = jnp.arange(3.0)
    before = count.count
    double(value)
    assert count.count == before + 1
    double(value)
    assert count.count == before + 1
