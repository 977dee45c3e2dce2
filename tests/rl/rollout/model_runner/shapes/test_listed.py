"""Programs that are compiled ahead: they fit whatever comes, nothing else is compiled, and results are the same."""

import dataclasses
import itertools
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.model_runner.shapes.buckets import Buckets, halvings
from rl.rollout.model_runner.shapes.listed import ReadyPrograms, Rules, Shape, listed_programs, rules_of
from rl.rollout.request import StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.speculation.speculator import Speculation
from rl.serving.input import sampling as served
from tests.rl.rollout.small import PLAIN, SAMPLERS, STOP, assert_same, drain, make_engine, mixed
from tests.rl.tiny import tiny_policy


def listed(rows: int, prompt: int, new: int, tokens: int, *, ragged: bool = False, drafts: bool = False):
    """Return the buckets of an engine, and its list."""
    cfg = RolloutEngine.Config(
        model=tiny_policy(),
        stop_tokens=(1,),
        max_prompt_tokens=prompt,
        max_new_tokens=new,
        max_num_seqs=rows,
        prefill_tokens=tokens,
        speculation=Speculation.Config() if drafts else None,
    )
    buckets = Buckets(max_num_seqs=rows, steps=32, prefill_tokens=tokens, longest=cfg.longest, ragged=ragged)
    return buckets, listed_programs(buckets, cfg)


SIZES = st.tuples(
    st.integers(1, 200), st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([64, 500, 512, 2048])
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(SIZES, st.booleans(), st.data())
def test_every_dispatch_of_every_engine_fits_a_program_as_soon_as_the_first_three_are_ready(sizes, ragged, data):
    """Whatever was compiled so far: rows, lengths, what is cached of them, and rules in any combination."""
    _, programs = listed(*sizes, ragged=ragged, drafts=data.draw(st.booleans()))
    ready = ReadyPrograms(programs)
    others = data.draw(st.lists(st.sampled_from(programs), max_size=len(programs)))
    for shape in itertools.chain(programs[: ready.NEEDED], others):
        ready.add(shape)
    ready.refresh()
    rows, longest = sizes[0], sizes[1] + sizes[2] - 1
    for rules in Rules:
        found = ready.find(Shape("decode", data.draw(st.integers(1, rows)), rules=rules))
        assert found in programs and max(ready.rows("decode", rules)) >= rows
    if longest < 1:
        return
    # The scheduler takes the room that the first sequence gets, and others beside it, each in part cached.
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=min(rows, 20)))
    lacking = [data.draw(st.integers(1, length)) for length in lengths]
    room, chunk = ready.prefill_room(lacking[0])
    chosen = [(length - n, min(chunk, n)) for length, n in zip(lengths, lacking, strict=True)][:room]
    tokens, keys = max(count for _, count in chosen), max(cached + count for cached, count in chosen)
    assert ready.find(Shape("prefill", len(chosen), tokens, keys)) in programs
    assert ready.find(Shape("score", 1, chosen[0][1], sum(chosen[0]))) in programs


def count_prefills(buckets: Buckets, longest: int) -> int:
    """Return the number of (rows, chunk, keys of the window) with which sequences of up to so many tokens prefill."""
    return sum(
        len({buckets.width(keys) for keys in range(shorter + 1, longest + 1)})
        * len(halvings(buckets.prefill_rows(10**6, chunk), 1))
        for shorter, chunk in itertools.pairwise([0, *buckets.chunks])
    )


def test_the_list_is_short_and_each_of_its_programs_is_once_there():
    for sizes in ((128, 34, 14, 512), (16, 1024, 1024, 512), (8, 24, 24, 512), (1, 1, 1, 64)):
        buckets, programs = listed(*sizes)
        assert len(programs) == len(set(programs)) <= 18
        every = count_prefills(buckets, sizes[1] + sizes[2]) + 5 * len(buckets.all_rows)
        assert len(programs) <= every, "of these a server without a list compiles any"
    assert len(listed(16, 1024, 1024, 512, ragged=True)[1]) < len(listed(16, 1024, 1024, 512)[1])


def test_a_dispatch_takes_the_smallest_program_that_is_ready():
    _, programs = listed(16, 1024, 1024, 512)
    ready = ReadyPrograms(programs)
    for shape in programs[:3]:
        ready.add(shape)
    asked = Shape("prefill", 1, 20, 30)
    assert ready.find(asked) is None, "what is added is used from the next refresh on"
    ready.refresh()
    assert ready.find(asked) == Shape("prefill", 1, 512, 2048)
    assert ready.find(Shape("decode", 1)) == Shape("decode", 16, rules=Rules.TABLES)
    assert ready.find(Shape("verify", 1)) is None
    for shape in programs:
        ready.add(shape)
    ready.refresh()
    assert ready.find(asked) == Shape("prefill", 1, 32, 256)
    assert ready.find(Shape("prefill", 5, 32, 300)) == Shape("prefill", 16, 32, 2048)
    assert ready.find(Shape("decode", 3)) == Shape("decode", 8, rules=Rules.EVERY)
    assert ready.find(Shape("decode", 3, rules=Rules.TABLES)) == Shape("decode", 16, rules=Rules.TABLES)


def test_rules_are_those_that_some_row_needs():
    found = [rules_of([sampler or Sampler.Config()]) for sampler in SAMPLERS]
    assert found == [Rules.PLAIN, Rules.EVERY, Rules.TABLES, Rules.PLAIN, Rules.EVERY]
    assert rules_of([]) == Rules.PLAIN
    assert rules_of([Sampler.Config(), Sampler.Config(logit_bias=((1, 1.0),))]) == Rules.TABLES


def test_there_is_room_for_the_stop_tokens_of_a_request_of_the_server():
    assert served.MAX_STOPS == 16 and make_engine(stored=None).runner.listed_stops >= 16 + len(PLAIN.tokens)


@pytest.fixture
def compiled():
    """Return a function that lists the programs that XLA has compiled since."""
    events: list[str] = []

    def note(event: str, duration_secs: float, **_: object) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield lambda: [event for event in events if "backend_compile" in event]
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["usual", "drafts, adapters, few pages"])
def test_nothing_is_compiled_for_requests_in_any_order(kind, compiled, monkeypatch):
    """Beside others and alone, with every kind of rules, preempted, resumed, with cached prefixes: to the bit.

    With scores, and with a length that is the least. The same holds as soon as the programs are there that fit all.
    """
    sizes: dict[str, Any] = {"page_size": 4, "steps_per_dispatch": 3}
    if kind != "usual":
        sizes |= {"max_num_seqs": 16, "prefill_tokens": 128, "pages": 40, "speculation": Speculation.Config()}
        sizes |= {"adapters": AdapterLimits(2, 4)}
    requests, engine = mixed(12), make_engine(**sizes)
    scored: dict[str, Any] = {"scores": "raw_logprobs", "prompt_scores": True}
    requests[4] = dataclasses.replace(requests[4], **scored)
    requests[6] = dataclasses.replace(requests[6], **scored, stop=StopConditions(STOP, max_new_tokens=0))
    requests[7] = dataclasses.replace(requests[7], stop=StopConditions(STOP, min_new_tokens=5))
    expected = make_engine(**sizes).generate(requests)
    needed, rest = engine.executor.compilations()
    for compile_one in needed:
        compile_one()
    decode, steps = engine.runner.decode, []

    def counted(*given: Any, **options: Any) -> dict[str, jax.Array]:
        steps.append(int((out := decode(*given, **options))["steps"]))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", counted)
        engine.executor.run_idle()
    assert steps and set(steps) == {1}  # each has run a step
    before = len(compiled())
    assert_same(engine.generate(requests), expected)
    assert len(compiled()) == before
    for compile_one in rest:
        compile_one()
    before = len(compiled())
    assert_same(engine.generate(requests), expected)
    for some in (requests[3:4], requests[10:12], requests[::-1]):
        engine.generate(some)
    for number, one in enumerate(requests):  # they come while others are under way
        engine.submit(one)
        for _ in range(number % 3):
            engine.step()
    drain(engine)
    stats = engine.stats()
    assert stats["prefix_cache_hit_tokens"] > 0 and (kind == "usual" or stats["preemptions"] > 0)
    assert kind == "usual" or stats["draft_dispatches"] > 0
    assert len(compiled()) == before
