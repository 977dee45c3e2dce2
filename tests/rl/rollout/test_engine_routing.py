"""Routing of mixtures of experts: recorded by the engine with each rollout, whole, and replayed by the trainer.

Behind a dense block, with a bias that decides nothing but the choice: changed between drawing and training, it flips
experts and leaves their weights alone.
"""

import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter
from axlearn_like.layers.moe.routing import CHOOSE, RoutingLayout
from mesh import UserError
from rl.objective.presets import grpo
from rl.protocol.headers import header_of, matches
from rl.protocol.messages import Group, Rollout, Score, contents_of
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.training.batching import PackedRows, PaddedRows, arrange, fill_packed, fill_padded
from rl.training.columns import Routing, recording, routing_layout, sequence_places
from rl.training.logprobs import fill_rows
from rl.training.packing import Packing
from rl.training.program import policy_logprobs, score_rows
from rl.training.spec import UpdateSpec
from tests.rl.rollout.small import assert_no_page_is_held, assert_same
from tests.rl.tiny import make_group, make_prompt, tiny_params, tiny_policy

pytestmark = pytest.mark.slow

VOCAB, MAX_PROMPT, MAX_NEW, LENGTH, TEMPERATURE = 272, 40, 12, 64, 0.8
EXPERTS, TOP_K = 6, 2


def policy() -> Decoder.Config:
    cfg = tiny_policy(num_layers=2)
    assert isinstance(cfg.block, Block.Config)
    router = SigmoidRouter.Config(top_k=TOP_K, scale=2.0)
    mixture = MoE.Config(num_experts=EXPERTS, router=router, experts=Experts.Config(hidden=24))
    blocks = (cfg.block.clone(feed_forward=mixture),)
    return cfg.set(block=BlockPattern.Config(blocks=blocks, leading=cfg.block, num_leading=1))


POLICY = policy()
RECORDING = recording(POLICY)


@functools.cache
def parameters() -> Params:
    return tiny_params(POLICY)


def graphdef() -> Any:
    return split(build_abstract(POLICY))[0]


@functools.cache
def layout() -> RoutingLayout:
    found = routing_layout(POLICY)
    assert found is not None
    return found


def record_of(rollout: Rollout) -> np.ndarray:
    assert rollout.routing is not None
    return rollout.routing


def perturbed() -> Params:
    """The parameters with another bias of the choice."""
    params = jax.tree.map(lambda leaf: leaf, parameters())
    router = params["layers"]["feed_forward"]["router"]
    bias = np.random.default_rng(1).normal(0, 0.5, router["balance_bias_e"].shape)
    router["balance_bias_e"] = (router["balance_bias_e"] + bias).astype(np.float32)
    return params


@functools.cache
def engine() -> RolloutEngine:
    made = RolloutEngine.Config(
        model=RECORDING,
        stop_tokens=(3, 50),
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        max_num_seqs=3,
        page_size=8,
        pages=14,
        prefill_tokens=64,
        steps_per_dispatch=4,
        sampler=Sampler.Config(temperature=TEMPERATURE),
    ).build()
    made.set_weights(parameters(), 1)
    return made


PROMPTS = [make_prompt(number, 3 + 9 * number) for number in range(5)]
REQUESTS = [Request(prompt, samples=2, seed=5, stop=StopConditions((3, 50))) for prompt in PROMPTS]


@functools.cache
def drawn() -> tuple[tuple[Rollout, ...], ...]:
    """Two rollouts of each prompt, drawn with so few pages that sequences were preempted."""
    before = engine().stats()
    rollouts = engine().generate(REQUESTS)
    after = engine().stats()
    assert after["preemptions"] > before["preemptions"]
    assert_no_page_is_held(engine())
    return tuple(tuple(rollouts[2 * g : 2 * g + 2]) for g in range(len(PROMPTS)))


def pairs() -> list[tuple[np.ndarray, Rollout]]:
    return [(p.tokens, rollout) for p, rollouts in zip(PROMPTS, drawn(), strict=True) for rollout in rollouts]


@functools.cache
def chosen() -> list[np.ndarray]:
    """The experts of each rollout by a forward pass over whole rows, int32 [tokens, 1, top_k]."""
    found = [(prompt, rollout.tokens) for prompt, rollout in pairs()]
    tokens = fill_rows(found, len(found), LENGTH)["tokens"]
    graphdef = split(build_abstract(RECORDING))[0]
    context = RowContext(jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape))
    aux = jax.jit(lambda params: bind(graphdef, params).hidden(tokens, context).aux)(parameters())
    routing = np.asarray(aux.routing)[1:].transpose(1, 2, 0, 3)  # without the dense layer
    return [routing[row, : len(p) + len(t) - 1] for row, (p, t) in enumerate(found)]


def assert_whole(rollouts: Any) -> None:
    for rollout, expected in zip(rollouts, chosen(), strict=True):
        assert rollout.routing.dtype == np.uint8
        np.testing.assert_array_equal(rollout.routing, expected)


@pytest.mark.full
def test_every_token_has_its_record_whatever_happened_to_its_pages():
    assert layout().layers == (1,) and layout().shape == (1, TOP_K)
    assert_whole([rollout for _, rollout in pairs()])
    assert len({tuple(token) for one in chosen() for token in one[:, 0].tolist()}) > 5


def test_a_cached_prefix_has_its_record_with_its_pages():
    first = engine().generate(REQUESTS[-1:])
    before = engine().stats()["prefix_cache_hit_tokens"]
    again = engine().generate(REQUESTS[-1:])
    assert engine().stats()["prefix_cache_hit_tokens"] - before >= 32
    for a, b, expected in zip(first, again, chosen()[-2:], strict=True):
        np.testing.assert_array_equal(a.routing, expected)
        np.testing.assert_array_equal(b.routing, expected)


def test_a_rollout_that_was_handed_back_goes_on_with_its_record():
    def partial(rollout: Rollout, kept: int, prompt: int) -> Rollout:
        names = ("tokens", "logprobs", "versions", "action_mask")
        cut = {name: getattr(rollout, name)[:kept] for name in names}
        return dataclasses.replace(
            rollout, **cut, finish_reason="abort", routing=record_of(rollout)[: prompt + kept - 1]
        )

    request, rollouts = REQUESTS[3], drawn()[3]
    handed = tuple(partial(rollout, 2, len(PROMPTS[3].tokens)) for rollout in rollouts)
    record = record_of(handed[0]).copy()
    again = engine().generate([dataclasses.replace(request, partial=handed)])
    assert_same(again, rollouts)
    for a, b in zip(again, rollouts, strict=True):
        np.testing.assert_array_equal(a.routing, b.routing)
    np.testing.assert_array_equal(handed[0].routing, record)


def record_rows(sequences: list[tuple[np.ndarray, Rollout]], rows: int) -> np.ndarray:
    return Routing(layout()).fill(sequence_places(sequences, rows, LENGTH))


@functools.cache
def score() -> Any:
    return jax.jit(lambda params, **rows: score_rows(bind(graphdef(), params), **rows))


def scored(params: Params, **rows: Any) -> list[np.ndarray]:
    found = pairs()
    rows = {**fill_rows([(p, r.tokens) for p, r in found], len(found), LENGTH), **rows}
    whole = score()(params, **rows, temperature=np.array([TEMPERATURE], np.float32)).logprobs()
    return [whole[row, len(p) - 1 :][: len(r.tokens)] for row, (p, r) in enumerate(found)]


def test_replay_gives_the_engine_s_log_probabilities_to_the_bit_though_choices_would_flip():
    other, record = perturbed(), record_rows(pairs(), len(pairs()))
    free, replayed = scored(other, routing=np.full_like(record, CHOOSE)), scored(other, routing=record)
    engine_s = [rollout.logprobs for _, rollout in pairs()]
    assert max(float(np.abs(a - b).max()) for a, b in zip(free, engine_s, strict=True)) > 1e-3
    for a, b in zip(replayed, engine_s, strict=True):
        assert np.asarray(a).tobytes() == b.tobytes(), a - b


def arranged(groups: list[Group], packing: Packing | None = None) -> Any:
    objective = grpo().build()
    headers = [header_of(group) for group in groups]
    layout = PackedRows(packing) if packing else PaddedRows(MAX_PROMPT, MAX_NEW)
    return arrange(headers, objective, layout)


@pytest.mark.numerics
@pytest.mark.full
def test_the_update_replays_and_its_gates_have_gradients():
    scores = (Score(1.0), Score(0.0))
    groups = [Group(prompt, rollouts, scores) for prompt, rollouts in zip(PROMPTS, drawn(), strict=True)]
    plan, contents = arranged(groups), contents_of(groups)
    rows = plan.microbatches[0].rows
    batch = fill_padded(rows, plan.prepared, contents, MAX_PROMPT, MAX_NEW, 2, [Routing(layout())])
    record = batch["routing"]
    mask = batch["action_mask"]

    def total(params: Params, routing: Any) -> Any:
        arrays: Any = {**batch, "routing": routing}
        found = policy_logprobs(bind(graphdef(), params), arrays, UpdateSpec(TEMPERATURE)).logprobs
        return jnp.sum(jnp.where(mask, found, 0.0)), found

    compute = jax.jit(jax.grad(total, has_aux=True))
    gradient, replayed = compute(perturbed(), record)
    _, free = compute(perturbed(), np.full_like(record, CHOOSE))
    np.testing.assert_allclose(np.asarray(replayed)[mask], batch["logprobs_behaviour"][mask], atol=2e-5)
    assert np.abs(np.asarray(free)[mask] - batch["logprobs_behaviour"][mask]).max() > 1e-3
    assert float(np.abs(gradient["layers"]["feed_forward"]["router"]["weight_de"]).max()) > 1e-4


@pytest.mark.parametrize("packed", [False, True])
def test_records_lie_where_their_tokens_do(packed: bool):
    """Records that are made of the tokens themselves, in rows of both layouts."""

    def made_of(tokens: np.ndarray) -> np.ndarray:
        return np.stack([tokens % 16, tokens // 16], axis=-1)[:, None].astype(np.uint8)

    groups = [make_group(make_prompt(g, 1 + 9 * g), [[7 * g, 9, 200], range(g + 1)], [0.0, 1.0]) for g in range(4)]
    for index, group in enumerate(groups):
        rollouts = tuple(
            dataclasses.replace(r, routing=made_of(np.concatenate([group.prompt.tokens, r.tokens])[:-1]))
            for r in group.rollouts
        )
        groups[index] = dataclasses.replace(group, rollouts=rollouts)
    sizes = {"max_prompt_tokens": MAX_PROMPT, "max_new_tokens": MAX_NEW}
    packing = Packing.Config(lengths=(32,), rows=2, prompts=80).build(**sizes) if packed else None
    plan, contents, column, seen = arranged(groups, packing), contents_of(groups), Routing(layout()), 0
    for one in plan.microbatches:
        if packing is None:
            batch = fill_padded(one.rows, plan.prepared, contents, MAX_PROMPT, MAX_NEW, 2, [column])
        else:
            batch = fill_packed(one.rows, one.length, plan.prepared, contents, packing, [column])
        record, described = batch["routing"], column.describe(batch["targets"].shape, batch["prefix"].shape[1])
        assert (record.shape, record.dtype) == (described.shape, described.dtype)
        tokens = np.concatenate([batch["prefix"], batch["inputs"].reshape(len(record), -1)], axis=1)
        live = record[:, :, 0, 0] != CHOOSE
        np.testing.assert_array_equal(record[live], made_of(tokens[live]))
        seen += int(live.sum())
    assert seen == sum(len(g.prompt.tokens) - 1 + sum(len(r.tokens) for r in g.rollouts) for g in groups)


def test_the_record_travels_and_is_part_of_the_digest():
    rollouts = drawn()[2]
    group = Group(PROMPTS[2], rollouts, (Score(0.0),) * 2)
    (sent,) = pickle.loads(pickle.dumps((group,)))
    contents = contents_of([sent])
    assert matches(contents, [header_of(group)])
    tokens = sum(len(PROMPTS[2].tokens) + len(rollout.tokens) - 1 for rollout in rollouts)
    assert Routing(layout()).nbytes(contents) == tokens * TOP_K
    forged = dataclasses.replace(rollouts[0], routing=record_of(rollouts[0]) ^ 1)
    assert not matches({0: (PROMPTS[2].tokens, {0: forged})}, [header_of(group)])


def test_rollouts_without_their_record_are_refused():
    bare = dataclasses.replace(drawn()[1][0], routing=None)
    with pytest.raises(UserError, match="prompt 1, sample 0 was drawn without a record of its routing; expected the 2"):
        record_rows([(PROMPTS[1].tokens, bare)], 1)
    other = dataclasses.replace(bare, routing=np.zeros((4, 3, 2), np.uint8))
    with pytest.raises(UserError, match=r"shape \(4, 3, 2\); expected the 2 experts of each token in 1 layers"):
        record_rows([(PROMPTS[1].tokens, other)], 1)
    with pytest.raises(ConfigError, match="has no MoE"):
        recording(tiny_policy())
