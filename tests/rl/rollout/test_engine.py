"""The engine: contents of a rollout, its distribution, compiled programs, and refused requests."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import set_path
from mesh import UserError
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from tests.rl.rollout.small import (
    MAX_NEW,
    MAX_PROMPT,
    POLICY,
    STOP,
    TEMPERATURE,
    VOCAB,
    assert_no_page_is_held,
    assert_same,
    drain,
    make_engine,
    mixed,
    params,
    plain_logits,
    request,
    text,
)
from tests.rl.tiny import make_prompt, make_rollout, tiny_params, tiny_policy

REQUESTS = [request(number) for number in range(10)]


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine()


@pytest.fixture(scope="module")
def rollouts(engine: RolloutEngine) -> list[Rollout]:
    return engine.generate(REQUESTS)


# ---- what a rollout is


def test_rollouts_come_in_order_of_request_and_sample_with_arrays_of_one_length(rollouts: list[Rollout]):
    expected = [(q.prompt.id, sample) for q in REQUESTS for sample in range(q.samples)]
    assert [(r.prompt_id, r.sample_id) for r in rollouts] == expected
    for r in rollouts:
        assert r.tokens.shape == r.logprobs.shape == r.versions.shape == r.action_mask.shape
        assert [a.dtype for a in (r.tokens, r.logprobs, r.versions, r.action_mask)] == ["i4", "f4", "i4", "?"]
        assert np.all(r.versions == 5) and np.all(r.action_mask) and np.all(r.logprobs < 0) and r.tags == ()


def test_a_stop_token_ends_the_completion_and_is_an_action_of_it(rollouts: list[Rollout]):
    for r in rollouts:
        stops = np.isin(r.tokens, STOP)
        if r.finish_reason == "stop":
            assert stops[-1] and not stops[:-1].any() and r.action_mask[-1]
        else:
            assert len(r.tokens) == MAX_NEW and not stops.any()
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    assert len({len(r.tokens) for r in rollouts}) > 5  # so the above was about completions of many lengths


def test_a_request_may_have_stop_rules_of_its_own(engine: RolloutEngine):
    for most in (1, 2, 7, MAX_NEW):
        (rollout,) = engine.generate([request(3, samples=1, stop=StopConditions(max_new_tokens=most))])
        assert len(rollout.tokens) == most and rollout.finish_reason == "length"
    (whole,) = engine.generate([request(3, samples=1, stop=StopConditions())])
    (cut,) = engine.generate([request(3, samples=1, stop=StopConditions(tokens=tuple(whole.tokens[[9, 6]].tolist())))])
    first = min(whole.tokens.tolist().index(whole.tokens[n]) for n in (6, 9))
    np.testing.assert_array_equal(cut.tokens, whole.tokens[: first + 1])
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize("begin,end", [(0, 1), (2, 5), (7, 9), (22, 24)])
def test_a_stop_string_ends_with_the_token_that_completes_it(engine: RolloutEngine, begin: int, end: int):
    """Some strings lie across two dispatches of four tokens."""
    (whole,) = engine.generate([request(3, samples=1, stop=StopConditions())])
    string = text(whole.tokens[begin:end])
    (cut,) = engine.generate([request(3, samples=1, stop=StopConditions(strings=("no such", string)))])
    kept = text(whole.tokens).index(string) + len(string)
    assert kept == end and cut.finish_reason == "stop"
    for name in ("tokens", "logprobs", "versions", "action_mask"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name)[:kept])


@pytest.mark.slow
@pytest.mark.numerics
def test_tokens_and_logprobs_are_those_of_a_plain_forward_pass_and_the_documented_keys(rollouts: list[Rollout]):
    """The distribution recomputed in float64, to 1e-5; the draws are the largest of logits and Gumbel noise."""
    prompts = [q.prompt for q in REQUESTS for _ in range(q.samples)]
    logits = plain_logits(params(), list(zip(prompts, rollouts, strict=True)))
    for prompt, r, raw in zip(prompts, rollouts, logits, strict=True):
        scaled = raw.astype(np.float64) / TEMPERATURE
        logp = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(r.logprobs, logp[np.arange(len(r.tokens)), r.tokens], rtol=0, atol=1e-5)
        noise = _noise(prompt, r.sample_id, len(r.tokens))
        np.testing.assert_array_equal(r.tokens, np.argmax(scaled + noise, axis=-1))


def _noise(prompt: Prompt, sample: int, length: int) -> np.ndarray:
    """The Gumbel noise of each draw, by the keys as rl/rollout/decoding/drawing.py documents them."""
    key = jax.random.key(jnp.uint32(11))
    for part in (prompt.id >> 32, prompt.id & 0xFFFFFFFF, sample):
        key = jax.random.fold_in(key, jnp.uint32(part))
    draws = [jax.random.gumbel(jax.random.fold_in(key, t), (VOCAB,)) for t in range(length)]
    return np.stack([np.asarray(draw) for draw in draws])


def test_seed_prompt_sample_and_weights_all_matter(engine: RolloutEngine, rollouts: list[Rollout]):
    long = [tuple(r.tokens) for r in rollouts if len(r.tokens) > 2]
    assert len(set(long)) == len(long)
    expected = [tuple(r.tokens) for r in rollouts if r.prompt_id == REQUESTS[2].prompt.id]
    assert [tuple(r.tokens) for r in engine.generate([request(2, seed=12)])] != expected
    engine.set_weights(params(1), 6)
    assert [tuple(r.tokens) for r in engine.generate([REQUESTS[2]])] != expected
    engine.set_weights(params(), 5, rewind=True)


@pytest.mark.slow
def test_on_tokens_hears_every_token_of_every_sample_in_order_before_the_end(engine: RolloutEngine):
    heard: dict[int, list[tuple[int, np.ndarray, np.ndarray, None]]] = {}
    asked = mixed(9)
    numbers = [
        engine.submit(q, lambda *told, at=index: heard.setdefault(at, []).append(told)) for index, q in enumerate(asked)
    ]
    finished: dict[int, Any] = {}
    while engine.busy:
        for one in engine.step():
            finished[one.number] = one
            for r in one.rollouts:  # by now all is said
                said = [told for told in heard[numbers.index(one.number)] if told[0] == r.sample_id]
                np.testing.assert_array_equal(np.concatenate([tokens for _, tokens, *_ in said]), r.tokens)
                np.testing.assert_array_equal(np.concatenate([logprobs for *_, logprobs, _ in said]), r.logprobs)
                assert all(0 < len(tokens) <= 4 for _, tokens, *_ in said)
    assert sorted(finished) == numbers


# ---- what is compiled


@pytest.mark.slow
def test_nothing_is_compiled_for_shapes_that_were_met_before(engine: RolloutEngine):
    asked = mixed(20)
    engine.generate(asked)
    before = engine.stats()["compilations"]
    assert before >= 4
    for seed in (1, 2):
        engine.set_weights(params(seed), 5)
        engine.generate([dataclasses.replace(q, seed=seed) for q in reversed(asked)])
    engine.set_weights(params(), 5)
    assert engine.stats()["compilations"] == before


def test_another_engine_of_the_same_sizes_compiles_nothing_and_draws_the_same(
    engine: RolloutEngine, rollouts: list[Rollout]
):
    known = engine.stats()["compilations"]
    twin = make_engine()
    assert_same(twin.generate(REQUESTS), rollouts)
    assert twin.stats()["compilations"] == known > 0
    assert make_engine(page_size=16).stats()["compilations"] == 0, "other sizes are other programs"


# ---- the queue


def test_nothing_to_do_gives_nothing(engine: RolloutEngine):
    assert not engine.busy and engine.step() == [] and engine.generate([]) == []


def test_generate_leaves_what_others_submitted_to_step(engine: RolloutEngine, rollouts: list[Rollout]):
    first, second = (engine.submit(REQUESTS[n]) for n in (4, 1))
    of_seven = [r for r in rollouts if r.prompt_id == REQUESTS[7].prompt.id]
    long = [request(33, samples=8, stop=StopConditions())]
    assert len(engine.generate(long)) == 8
    assert_same(engine.generate([REQUESTS[7]]), of_seven)
    assert engine.busy
    finished = drain(engine)
    assert sorted(finished) == [first, second]
    assert_same(finished[second].rollouts, [r for r in rollouts if r.prompt_id == REQUESTS[1].prompt.id])


def test_generate_of_a_request_that_is_refused_takes_back_the_others(engine: RolloutEngine):
    with pytest.raises(UserError, match="asks for 0 samples"):
        engine.generate([REQUESTS[0], request(1, samples=0)])
    assert not engine.busy and engine.step() == []
    assert_no_page_is_held(engine)


def test_a_full_queue_refuses_until_something_has_ended():
    engine = make_engine(max_queue=2)
    numbers = [engine.submit(request(n)) for n in range(2)]
    with pytest.raises(UserError, match=r"\(chain_sum\): 2 requests are unfinished \(RolloutEngine.max_queue"):
        engine.submit(request(2))
    engine.abort(numbers[0])
    assert engine.submit(request(2)) == 2
    assert sorted(drain(engine)) == [0, 1, 2]


def test_without_weights_it_says_so_and_loses_nothing():
    engine = RolloutEngine.Config(
        model=POLICY, stop_tokens=STOP, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW
    ).build()
    with pytest.raises(UserError, match="no weights yet"):
        engine.generate([REQUESTS[0]])
    number = engine.submit(REQUESTS[0])
    with pytest.raises(UserError, match="no weights yet"):
        engine.step()
    assert [one.number for one in engine.abort_all()] == [number]


# ---- what is refused

LONG = make_rollout(make_prompt(7), 0, [1] * (MAX_NEW + 1))
PART = make_rollout(make_prompt(7), 0, [1, 2])
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": make_prompt(7, 0)}, "has 0 tokens; the engine takes 1 to 40 .RolloutEngine.max_prompt_tokens"),
    ({"prompt": make_prompt(7, 41)}, "has 41 tokens; the engine takes 1 to 40"),
    ({"prompt": Prompt(7, "chain_sum", np.array([3, VOCAB], np.int32))}, "has token 272; the vocabulary is 0 to 271"),
    ({"prompt": Prompt(7, "chain_sum", np.array([-1], np.int32))}, "has token -1; the vocabulary is 0 to 271"),
    ({"samples": 0}, "asks for 0 samples; expected 1 or more"),
    ({"deadline": 0.0}, "has a deadline of 0.0 s; expected more than 0"),
    ({"deadline": float("nan")}, "has a deadline of nan s"),
    ({"adapter": "french"}, "no adapter 'french' is loaded; there are: none"),
    ({"sampler": Sampler.Config(top_p=2.0)}, "sampler.top_p: expected a share"),
    ({"sampler": Sampler.Config(logit_bias=((VOCAB, 1.0),))}, "sampler.logit_bias names token 272"),
    (
        {"stop": StopConditions(max_new_tokens=0)},
        "asks for 0 new tokens; the engine gives 1 to 24 .RolloutEngine.max_new_tokens",
    ),
    ({"stop": StopConditions(max_new_tokens=25)}, "asks for 25 new tokens"),
    ({"stop": StopConditions(tokens=(3, VOCAB))}, "has stop token 272; the vocabulary is 0 to 271"),
    ({"stop": StopConditions(strings=("",))}, "stop string ''"),
    ({"partial": (make_rollout(make_prompt(8), 0, [1]),)}, "partial rollout of sample 0 is of prompt 8"),
    ({"partial": (PART, PART)}, "partial rollout of sample 0 is there twice"),
    ({"partial": (LONG,)}, "partial rollout of sample 0 has 25 tokens; the request allows 24"),
    ({"partial": (make_rollout(make_prompt(7), 2, [999]),)}, "partial rollout of sample 2 has token 999"),
]


@pytest.mark.parametrize("fields,message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_a_request_that_cannot_be_carried_out_is_refused_by_name(
    engine: RolloutEngine, fields: dict[str, Any], message: str
):
    with pytest.raises(UserError, match=rf"^prompt 7 \(chain_sum\).*{message}"):
        engine.submit(Request(**{"prompt": make_prompt(7), **fields}))
    assert not engine.busy


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_a_prompt_id_that_makes_no_key_is_refused(engine: RolloutEngine, number: int):
    with pytest.raises(UserError, match=rf"prompt {number} .*expected 0 to 2\*\*64 - 1"):
        engine.submit(Request(Prompt(number, "chain_sum", np.array([1], np.int32))))


def test_stop_strings_need_a_decoder():
    engine = RolloutEngine.Config(
        model=POLICY, stop_tokens=STOP, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW
    ).build()
    with pytest.raises(UserError, match="prompt 1 .*stop strings need an engine that was built with a tokenizer"):
        engine.submit(Request(make_prompt(1), stop=StopConditions(strings=("x",))))


@pytest.mark.slow
def test_a_request_that_the_cache_could_never_hold_is_refused():
    engine = make_engine(pages=5)
    with pytest.raises(UserError, match=r"may need 8 pages of 8 tokens; the cache has 4 \(RolloutEngine.pages\)"):
        engine.submit(Request(make_prompt(1, 40)))
    assert len(engine.generate([Request(make_prompt(1, 8), stop=StopConditions(max_new_tokens=24))])) == 1


def _one(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


SIZES = [
    ("max_prompt_tokens", 0),
    ("max_new_tokens", 0),
    ("max_num_seqs", 0),
    ("steps_per_dispatch", 0),
    ("prefills_per_iteration", 0),
]
SIZES += [("page_size", 0), ("page_size", 24), ("page_size", 128), ("prefill_tokens", 63), ("pages", 1), ("pages", 0)]


@pytest.mark.parametrize("name,value", [*SIZES, ("max_queue", 0)])
def test_sizes_that_cannot_be_are_refused_by_name(name: str, value: int):
    with pytest.raises(UserError, match=rf"RolloutEngine\.{name}: expected .*, got {value}"):
        make_engine(**_one(name, value))


# ---- meshes


@pytest.mark.slow
@pytest.mark.parametrize("one", ["max_num_seqs", "max_prompt_tokens", "max_new_tokens", "num_kv_heads", "page_size"])
def test_every_size_may_be_one(one: str):
    """A plain reshape of an axis of size one loses its sharding, which explicit sharding refuses."""
    sizes: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_prompt_tokens": 3,
        "max_new_tokens": 3,
        "num_kv_heads": 2,
        "page_size": 2,
        one: 1,
    }
    model = tiny_policy()
    set_path(model, "block.attention.num_kv_heads", sizes.pop("num_kv_heads"))
    engine = RolloutEngine.Config(model=model, stop_tokens=(), **sizes).build()
    engine.set_weights(tiny_params(model), 0)
    rollouts = engine.generate(
        [Request(make_prompt(n, 1 + n % sizes["max_prompt_tokens"]), samples=2) for n in range(2)]
    )
    assert [len(r.tokens) for r in rollouts] == [sizes["max_new_tokens"]] * 4
    assert all(np.all(np.isfinite(r.logprobs)) for r in rollouts)
