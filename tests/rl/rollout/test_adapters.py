"""Several LoRA adapters in one engine: each row has its own, in any mixture, loaded and replaced while it runs."""

import dataclasses
from collections.abc import Generator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_like.config import replace
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.parameter_names import merged
from axlearn_like.layers.wrappers.adapters import Adapter, Factors, adapter_of, matrices
from axlearn_like.layers.wrappers.base import plain_params
from axlearn_like.layers.wrappers.lora import LoRA
from mesh import UserError
from rl.rollout.agent_loops.commands import AgentLoop, Command, Completion, Generate, Join, Observe, Spawn, single_turn
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.request import Request, RequestOutput, StopConditions
from tests.rl.rollout.small import POLICY, assert_no_page_is_held, assert_same, drain, make_engine, params, request
from tests.rl.tiny import tiny_params

pytestmark = pytest.mark.slow

LIMITS = AdapterLimits(slots=3, rank=4)
NAMES = ("french", "poems", "sums")


def lora_policy(rank: int, *, match: tuple[str, ...] = ("*",)) -> Any:
    """The policy with LoRA around all layers of all blocks."""
    adapt = lambda inner: LoRA.Config(inner=inner, rank=rank, alpha=2.0 * rank, match=match)  # noqa: E731
    cfg = POLICY.clone()
    replace(cfg, Block.Config, lambda b: b.set(attention=adapt(b.attention), feed_forward=adapt(b.feed_forward)))
    return cfg


@cache
def lora_params(name: str) -> tuple[Any, Params]:
    """A policy with LoRA layers of this adapter's rank, and its parameters: those of `params()`, and random factors."""
    number = NAMES.index(name)
    cfg = lora_policy(1 + number)
    whole = split(cfg.build(rngs=nnx.Rngs(number)))[1]
    base = params()
    layers = {k: {"inner": v} if k in ("attention", "feed_forward") else v for k, v in base["layers"].items()}
    rng = np.random.default_rng(number)
    wild = jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape).astype(np.float32), whole)
    factors = {"layers": {k: {"lora": wild["layers"][k]["lora"]} for k in ("attention", "feed_forward")}}
    return cfg, merged({**base, "layers": layers}, factors)


def adapter(name: str) -> Adapter:
    return adapter_of(*lora_params(name))


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    """An engine with three adapters of ranks 1, 2 and 3."""
    made = make_engine(adapters=LIMITS)
    for name in NAMES:
        made.load_adapter(name, adapter(name))
    return made


@pytest.fixture(scope="module")
def plain() -> RolloutEngine:
    """An engine of the base that knows no adapters."""
    return make_engine()


def requests(*names: str | None) -> list[Request]:
    return [request(number, adapter=name, samples=2) for number, name in enumerate(names)]


def test_a_mixture_draws_what_each_adapter_draws_alone(engine: RolloutEngine, plain: RolloutEngine):
    mixture = requests("french", None, "poems", "sums", "french", None, "sums", "poems")
    mixed = engine.generate(mixture)
    alone = [engine.generate([one]) for one in mixture]
    compiled = engine.stats()["compilations"]
    for number in range(len(mixture)):
        assert_same(mixed[2 * number : 2 * number + 2], alone[number])
    for number in (1, 5):
        assert_same(alone[number], plain.generate([mixture[number]]))
    drawn = {engine.generate([request(3, adapter=name)])[0].tokens.tobytes() for name in (None, *NAMES)}
    assert len(drawn) == 4, "each adapter draws something else"
    engine.load_adapter("sums", adapter("sums"))
    engine.generate(requests("sums", "sums", "sums", None, "poems", "french", "poems", None))
    assert engine.stats()["compilations"] == compiled, "neither another mixture nor another adapter is compiled"


def test_rollouts_record_the_version_of_their_adapter_or_of_the_base(engine: RolloutEngine):
    engine.load_adapter("poems", adapter("poems"), version=8)
    asked = requests("poems", None, "french")
    for one in asked:
        engine.submit(one)
    assert engine.unfinished == 6, "samples of prompts that are not in the cache yet count"
    drawn = [{int(v) for r in one.rollouts for v in r.versions} for _, one in sorted(drain(engine).items())]
    assert drawn == [{8}, {5}, {0}] and engine.unfinished == 0
    engine.load_adapter("poems", adapter("poems"))


@pytest.mark.numerics
def test_logprobs_are_those_of_merged_weights(engine: RolloutEngine, plain: RolloutEngine):
    cfg, whole = lora_params("sums")
    graphdef, _ = split(build_abstract(cfg))
    plain.set_weights(jax.jit(lambda p: plain_params(graphdef, p))(whole), 6)
    expected = plain.generate([request(number, samples=1) for number in range(4)])
    plain.set_weights(params(), 5, rewind=True)
    found = engine.generate([request(number, samples=1, adapter="sums") for number in range(4)])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=4e-5)  # sums of weights are rounded, too


def test_keys_and_values_of_one_adapter_are_not_used_for_another(engine: RolloutEngine):
    long = request(4, samples=1)  # 29 tokens: three full pages of the prompt
    assert len(long.prompt.tokens) > 3 * 8
    reused = []
    engine.set_weights(params(), 5)  # forgets what the tests before have cached
    for name in ("french", "french", None, "poems", "french"):
        before = engine.stats()["prefix_cache_hit_tokens"]
        engine.generate([dataclasses.replace(long, adapter=name, seed=len(reused))])
        reused.append(engine.stats()["prefix_cache_hit_tokens"] - before)
    assert [count > 0 for count in reused] == [False, True, False, False, True]
    engine.load_adapter("french", adapter("poems"))  # another adapter by this name
    before = engine.stats()["prefix_cache_hit_tokens"]
    found = engine.generate([dataclasses.replace(long, adapter="french")])
    assert engine.stats()["prefix_cache_hit_tokens"] == before
    assert_same(found, engine.generate([dataclasses.replace(long, adapter="poems")]))
    engine.load_adapter("french", adapter("french"))
    assert_no_page_is_held(engine)


def test_requests_keep_the_adapter_they_began_with(engine: RolloutEngine):
    asked = requests("french", "poems")
    expected = engine.generate(asked)
    engine.unload_adapter("sums")  # a slot for the successor
    for one in asked:
        engine.submit(one)
    engine.step()
    engine.load_adapter("french", adapter("sums"))  # while requests of the old one are running
    engine.unload_adapter("poems")
    with pytest.raises(UserError, match="adapter 'fourth': all 3 slots are taken, by french, and 2 of unfinished"):
        engine.load_adapter("fourth", adapter("sums"))
    assert set(engine.adapters) == {"french"}
    assert_same([rollout for _, one in sorted(drain(engine).items()) for rollout in one.rollouts], expected)
    for name in NAMES:  # slots of what has ended are free again
        engine.load_adapter(name, adapter(name))
    assert_same(engine.generate(asked), expected)


def spawns(*policies: str | None) -> AgentLoop:
    """A loop that draws a token, and lets each of these policies complete one prompt."""

    def loop(completion: Completion) -> Generator[Command, Any, None]:
        yield Generate(1)
        children = []
        for policy in policies:
            children.append((yield Spawn(list(range(1, 18)), single_turn, 6, policy)))
        for rollout in (yield Join(tuple(children))):
            yield Observe(rollout.tokens.tolist())

    return loop


def test_a_spawned_completion_is_drawn_by_the_policy_that_it_names(engine: RolloutEngine):
    engine.load_adapter("poems", adapter("poems"), version=8)
    asked = request(3, samples=1, stop=StopConditions())
    named: dict[str, str | None] = {"judge": "poems", "older": None}
    mixed = dataclasses.replace(asked, adapter="french", policies=named, agent_loop=spawns("judge", None, "older"))
    found = _only(engine, mixed)
    assert found.error is None
    for place, (name, version) in enumerate([("poems", 8), ("french", 0), (None, 5)]):
        inherits = dataclasses.replace(asked, adapter=name, agent_loop=spawns(None, None, None))
        expected = _only(engine, inherits).spawned[place][1]  # of the same sample id
        assert_same([found.spawned[place][1]], [expected])
        assert set(expected.versions.tolist()) == {version} and len(expected.tokens) == 6
    assert len({rollout.tokens.tobytes() for _, rollout in found.spawned}) == 3
    assert found.rollouts[0].action_mask.sum() == 1, "what others draw is given"
    wrong = _only(engine, dataclasses.replace(mixed, agent_loop=spawns("jugde")))
    assert wrong.error is not None and "policy 'jugde'" in wrong.error and "mean 'judge'" in wrong.error
    with pytest.raises(UserError, match="prompt .*no adapter 'poem' is loaded"):
        engine.submit(dataclasses.replace(mixed, policies={"judge": "poem"}))
    engine.load_adapter("poems", adapter("poems"))


def test_a_request_keeps_the_policies_that_its_loops_may_name(engine: RolloutEngine):
    asked = request(3, samples=1, stop=StopConditions())
    asked = dataclasses.replace(asked, adapter="french", policies={"judge": "poems"}, agent_loop=spawns("judge"))
    expected = _only(engine, asked).spawned
    engine.unload_adapter("sums")  # a slot for the successor
    number = engine.submit(asked)
    engine.load_adapter("poems", adapter("sums"))  # before the child is spawned
    found = drain(engine)[number].spawned
    assert_same([rollout for _, rollout in found], [rollout for _, rollout in expected])
    for name in NAMES:
        engine.load_adapter(name, adapter(name))


def _only(engine: RolloutEngine, asked: Request) -> RequestOutput:
    number = engine.submit(asked)
    return drain(engine)[number]


@pytest.mark.full
def test_preempted_requests_and_a_slept_engine_draw_the_same(engine: RolloutEngine):
    asked = requests("french", "poems", "sums", None)
    expected = engine.generate(asked)
    small = make_engine(adapters=LIMITS, pages=14)
    for name in NAMES:
        small.load_adapter(name, adapter(name))
    small.sleep()
    small.set_weights(params(), 5)
    assert_same(small.generate(asked), expected)
    assert small.stats()["preemptions"] > 0


@pytest.mark.full
def test_rows_of_latent_attention_have_their_own_adapters():
    """Keys and values of cached latents are made for groups of rows, so no adapter of those projections is taken."""
    policy = POLICY.clone()
    latent = LatentAttention.Config(num_heads=2, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=8)
    replace(policy, Block.Config, lambda block: block.set(attention=latent))
    known = dict(matrices(build_abstract(policy)))
    assert {path.rpartition("/")[2] for path in known} == {
        "q_dkqh", "kv_down_dr", "out_kqhd", "gate_df", "up_df", "down_fd"
    }  # fmt: skip
    rng = np.random.default_rng(0)
    made = make_engine(tiny_params(policy), model=policy, adapters=LIMITS)
    for name in NAMES:
        shapes = {path: ((m.layers, m.inputs, 2), (m.layers, 2, m.outputs)) for path, m in known.items()}
        random = {path: Factors(*(0.5 * rng.standard_normal(shape) for shape in both)) for path, both in shapes.items()}
        made.load_adapter(name, Adapter(random))
    mixture = requests("french", None, "poems", "sums")
    mixed = made.generate(mixture)
    for number, one in enumerate(mixture):
        assert_same(mixed[2 * number : 2 * number + 2], made.generate([one]))
    assert len({made.generate([request(3, adapter=name)])[0].tokens.tobytes() for name in (None, *NAMES)}) == 4


WRONG: list[tuple[Any, str]] = [
    (lambda a: Adapter({k: Factors(np.tile(f.a, 5), np.tile(f.b, (5, 1))) for k, f in a.items()}), "it has rank 15; "),
    (lambda a: Adapter({k.replace("q_dk", "q_dx"): f for k, f in a.items()}), "it adapts layers/attention/q_dxqh, whi"),
    (lambda a: Adapter({k: Factors(f.a[:, 1:], f.b) for k, f in a.items()}), "it was made for another base"),
    (lambda a: Adapter({k: Factors(f.a * np.nan, f.b) for k, f in a.items()}), "are not all numbers"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_an_adapter_that_does_not_fit_is_refused(engine: RolloutEngine, wrong: Any, message: str):
    loaded = engine.adapters
    with pytest.raises(UserError, match=f"adapter 'wrong': .*{message}"):
        engine.load_adapter("wrong", wrong(adapter("sums").factors))
    assert engine.adapters == loaded


def test_names_and_room_that_are_not_there_are_refused(engine: RolloutEngine, plain: RolloutEngine):
    with pytest.raises(UserError, match=r"prompt \d+ .*: no adapter 'fench' is loaded; .*did you mean 'french'"):
        engine.submit(request(1, adapter="fench"))
    with pytest.raises(UserError, match="no adapter 'x' is loaded; there are: french, poems, sums"):
        engine.unload_adapter("x")
    with pytest.raises(UserError, match="adapter 'x': this engine has no room for adapters"):
        plain.load_adapter("x", adapter("sums"))
    with pytest.raises(UserError, match="AdapterLimits.rank: got 0; expected 1 or more"):
        AdapterLimits(slots=1, rank=0)
    with pytest.raises(UserError, match="no matrix of the model fits"):
        make_engine(adapters=AdapterLimits(slots=1, match=("*/q_proj",)))
    with pytest.raises(UserError, match="has no LoRA layers"):
        adapter_of(POLICY, params())
