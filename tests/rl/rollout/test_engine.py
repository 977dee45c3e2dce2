"""A request's rollouts depend on the request and the weights alone, and are scored as a plain forward pass does it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.config_edit import set_path
from axlearn_like.layers.base import Params, bind, split
from axlearn_like.layers.context import PackedContext
from axlearn_like.layers.decoder import Decoder
from mesh import UserError, make_mesh, shard_batch, to_named_sharding
from rl.messages import Rollout
from rl.rollout.engine import Request, RolloutEngine
from rl.sampling import Sampler, at_position, sample_keys
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy

ROOT = Path(__file__).parents[3]
STOP = tuple(range(0, 272, 4))  # a quarter of the vocabulary: completions of all lengths
SAMPLES, MAX_PROMPT, MAX_NEW = 3, 7, 6
TEMPERATURE = 0.8
SEED = 11
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


class CountingDecoder(Decoder):
    """Counts how often it is traced."""

    class Config(Decoder.Config):
        pass

    traces = 0

    def hidden(self, *args: Any) -> Any:
        CountingDecoder.traces += 1
        return super().hidden(*args)


def policy() -> Decoder.Config:
    plain = tiny_policy(num_layers=2)
    return CountingDecoder.Config(
        vocab_size=plain.vocab_size, dim=plain.dim, num_layers=plain.num_layers, block=plain.block
    )


def params(seed: int = 0) -> Params:
    return tiny_params(policy(), seed)


def make_engine() -> RolloutEngine:
    cfg = RolloutEngine.Config(
        model=policy(),
        stop_tokens=STOP,
        max_prompt=MAX_PROMPT,
        max_new=MAX_NEW,
        samples=SAMPLES,
        groups=4,
        sampler=Sampler.Config(temperature=TEMPERATURE),
    )
    return cfg.build()


def request(number: int, seed: int = SEED) -> Request:
    """Prompts of all lengths from 1 to the longest; some ids need more than 32 bits."""
    number += (number % 3) << 33
    return Request(make_prompt(number, 1 + number % MAX_PROMPT), SAMPLES, seed)


REQUESTS = [request(number) for number in range(8)]


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    """Compiled once for all tests of this file; each sets the weights it needs."""
    return make_engine()


@pytest.fixture(scope="module")
def alone(engine: RolloutEngine) -> dict[int, list[Rollout]]:
    """What each request gives if it is the only one, by prompt id."""
    engine.set_weights(params(), 5)
    return {r.prompt.id: engine.generate([r]) for r in REQUESTS}


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    """To the bit."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        key = (one.prompt_id, one.sample_id, one.finish_reason)
        assert key == (other.prompt_id, other.sample_id, other.finish_reason)
        for name in ("tokens", "logprobs", "versions", "action_mask"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.tobytes() == b.tobytes(), name


# ---- what a rollout is


def test_rollouts_come_in_order_of_request_and_sample_with_arrays_of_one_length(engine: RolloutEngine):
    engine.set_weights(params(), 5)
    rollouts = engine.generate(REQUESTS)
    assert [(r.prompt_id, r.sample_id) for r in rollouts] == [
        (q.prompt.id, n) for q in REQUESTS for n in range(SAMPLES)
    ]
    for r in rollouts:
        assert r.tokens.shape == r.logprobs.shape == r.versions.shape == r.action_mask.shape
        assert [a.dtype for a in (r.tokens, r.logprobs, r.versions, r.action_mask)] == ["i4", "f4", "i4", "?"]
        assert np.all(r.versions == 5) and np.all(r.action_mask) and np.all(r.logprobs < 0)


def test_a_stop_token_ends_the_completion_and_is_an_action_of_it(alone: dict[int, list[Rollout]]):
    rollouts = [r for group in alone.values() for r in group]
    for r in rollouts:
        stops = np.isin(r.tokens, STOP)
        if r.finish_reason == "stop":
            assert stops[-1] and not stops[:-1].any() and r.action_mask[-1]
        else:
            assert len(r.tokens) == MAX_NEW and not stops.any()
    reasons = [r.finish_reason for r in rollouts]
    assert {"stop", "length"} <= set(reasons)
    assert len({len(r.tokens) for r in rollouts}) > 3  # so the above was about completions of many lengths


def test_tokens_and_logprobs_are_those_of_a_plain_forward_pass_and_the_documented_keys(
    alone: dict[int, list[Rollout]],
):
    """Whole sequences in packed attention, without trunk, branches and cache; float32, to 4e-6 (measured 2e-6)."""
    graphdef, _ = split(jax.eval_shape(lambda: tiny_policy(num_layers=2).build(rngs=nnx.Rngs(0))))
    length = MAX_PROMPT + MAX_NEW
    rows = [(q, r) for q in REQUESTS for r in alone[q.prompt.id]]
    tokens = np.zeros((len(rows), length), np.int32)
    for row, (q, r) in enumerate(rows):
        whole = np.concatenate([q.prompt.tokens, r.tokens])
        tokens[row, : len(whole)] = whole
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    context = PackedContext(positions=positions, segment_ids=jnp.ones_like(positions))
    logits = jax.jit(lambda p, t: bind(graphdef, p)(t, context))(params(), tokens)
    scaled = np.asarray(logits, np.float64) / TEMPERATURE
    logp = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    ids = np.array([[q.prompt.id >> 32, q.prompt.id & 0xFFFFFFFF] for q in REQUESTS], np.uint32)
    keys = sample_keys(jnp.uint32(SEED), jnp.asarray(ids), SAMPLES)
    noise = np.stack(
        [
            np.asarray(jax.vmap(lambda k: jax.random.gumbel(k, (272,)))(at_position(keys, jnp.int32(t)).reshape(-1)))
            for t in range(MAX_NEW)
        ]
    )
    for row, (q, r) in enumerate(rows):
        at = len(q.prompt.tokens) - 1 + np.arange(len(r.tokens))
        np.testing.assert_allclose(r.logprobs, logp[row, at, r.tokens], rtol=0, atol=4e-6)
        drawn = np.argmax(scaled[row, at] + noise[: len(at), row], axis=-1)
        np.testing.assert_array_equal(r.tokens, drawn)


# ---- what a rollout does not depend on


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [7, 2, 5, 0, 3], [4, 4, 1, 4], [6, 0]], ids=str)
def test_neither_batch_nor_slot_changes_a_bit(engine: RolloutEngine, alone: dict[int, list[Rollout]], order: list[int]):
    engine.set_weights(params(), 5)
    chosen = [REQUESTS[i] for i in order]
    assert_same(engine.generate(chosen), [r for q in chosen for r in alone[q.prompt.id]])


def test_another_engine_gives_the_same_bits(alone: dict[int, list[Rollout]]):
    """As when a lost lease is generated again by another worker."""
    other = make_engine()
    other.set_weights(jax.tree.map(jnp.asarray, params()), 5)
    assert_same(other.generate(REQUESTS[:3]), [r for q in REQUESTS[:3] for r in alone[q.prompt.id]])


def test_seed_prompt_sample_and_weights_all_matter(engine: RolloutEngine, alone: dict[int, list[Rollout]]):
    engine.set_weights(params(), 5)
    everything = [tuple(r.tokens) for group in alone.values() for r in group]
    assert len(set(everything)) > 0.8 * len(everything)
    reseeded = engine.generate([request(1, seed=SEED + 1)])
    assert [tuple(r.tokens) for r in reseeded] != [tuple(r.tokens) for r in alone[REQUESTS[1].prompt.id]]
    engine.set_weights(params(seed=1), 6)
    changed = engine.generate([REQUESTS[1]])
    assert [tuple(r.tokens) for r in changed] != [tuple(r.tokens) for r in alone[REQUESTS[1].prompt.id]]
    assert all(np.all(r.versions == 6) for r in changed)


def test_requests_of_different_seeds_may_be_queued_together(engine: RolloutEngine, alone: dict[int, list[Rollout]]):
    engine.set_weights(params(), 5)
    other = engine.generate([request(2, seed=99)])
    mixed = engine.generate([REQUESTS[1], request(2, seed=99), REQUESTS[3]])
    assert_same(mixed, [*alone[REQUESTS[1].prompt.id], *other, *alone[REQUESTS[3].prompt.id]])


def test_nothing_is_compiled_after_the_first_batch(engine: RolloutEngine, alone: dict[int, list[Rollout]]):
    before = CountingDecoder.traces
    assert before > 0
    for seed, count in ((3, 1), (4, 8), (5, 3)):
        engine.set_weights(params(seed), seed)
        assert len(engine.generate(REQUESTS[:count])) == count * SAMPLES
    assert CountingDecoder.traces == before


# ---- the queue


def test_an_empty_queue_gives_nothing(engine: RolloutEngine):
    engine.set_weights(params(), 5)
    assert engine.step() == [] and engine.generate([]) == []


def test_step_takes_the_oldest_batch(engine: RolloutEngine, alone: dict[int, list[Rollout]]):
    engine.set_weights(params(), 5)
    for q in REQUESTS[:5]:
        engine.submit(q)
    assert_same(engine.step(), [r for q in REQUESTS[:4] for r in alone[q.prompt.id]])
    assert_same(engine.step(), alone[REQUESTS[4].prompt.id])
    assert engine.step() == []


@pytest.mark.parametrize("length", [0, MAX_PROMPT + 1])
def test_a_prompt_that_does_not_fit_is_refused_by_name(engine: RolloutEngine, length: int):
    prompt = make_prompt(77, length, family="chain_sum")
    with pytest.raises(UserError, match=rf"prompt 77 \(chain_sum\) has {length} tokens; the engine takes 1 to 7"):
        engine.submit(Request(prompt, SAMPLES, SEED))
    engine.set_weights(params(), 5)
    assert engine.step() == []  # and is not queued


def test_another_number_of_samples_is_refused(engine: RolloutEngine):
    with pytest.raises(UserError, match="prompt 1 asks for 2 samples; this engine is built for 3"):
        engine.submit(Request(make_prompt(1), 2, SEED))


def test_without_weights_it_says_so():
    fresh = make_engine()
    fresh.submit(REQUESTS[0])
    with pytest.raises(UserError, match="no weights yet"):
        fresh.step()


# ---- meshes


@pytest.mark.parametrize("one", ["groups", "samples", "max_new", "num_kv_heads", "num_layers"])
def test_on_a_mesh_every_size_may_be_one(one: str):
    """Where a size is one, a plain reshape forgets how an axis is spread, and explicit sharding objects."""
    sizes = {"groups": 2, "samples": 2, "max_new": 3, "num_kv_heads": 2, "num_layers": 2, one: 1}
    model = tiny_policy(num_layers=sizes.pop("num_layers"))
    set_path(model, "block.attention.num_kv_heads", sizes.pop("num_kv_heads"))
    groups, samples, steps = sizes["groups"], sizes["samples"], sizes["max_new"]
    engine = RolloutEngine.Config(
        model=model, stop_tokens=(1,), max_prompt=4, max_new=steps, samples=samples, groups=groups
    ).build()
    with jax.set_mesh(make_mesh()):
        batch = shard_batch(engine._pack([Request(make_prompt(1, 4), samples, SEED)]))
        out = jax.eval_shape(engine._run, tiny_params(model), batch)
    assert out["tokens"].shape == out["logprobs"].shape == (groups, samples, steps)


def print_rollouts_on_a_mesh() -> None:
    """What the child process below does: the same requests with weights spread over the mesh, and with host arrays."""
    mesh = make_mesh(MESH)
    engine = make_engine()
    for spread in (True, False):
        with jax.set_mesh(mesh):
            weights = params()
            if spread:
                abstract = jax.eval_shape(lambda: split(policy().build(rngs=nnx.Rngs(0)))[1])
                shardings = jax.tree.map(lambda a: a.sharding, to_named_sharding(abstract, mesh))
                weights = jax.device_put(weights, shardings)
                cut = [x.addressable_shards[0].data.size < x.size for x in jax.tree.leaves(weights)]
                assert sum(cut) >= 8, "most parameters are spread"
            engine.set_weights(weights, 5)
            rollouts = engine.generate(REQUESTS)
        print(json.dumps([[r.tokens.tolist(), r.logprobs.tolist(), r.finish_reason] for r in rollouts]))


def test_on_eight_devices_it_draws_the_same_tokens(alone: dict[int, list[Rollout]]):
    """Axes data, fsdp and tensor, two devices each: log-probabilities equal to those of one device within 1e-5."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", "from tests.rl.rollout.test_engine import print_rollouts_on_a_mesh as p; p()"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = [r for q in REQUESTS for r in alone[q.prompt.id]]
    for line in done.stdout.splitlines():
        for (tokens, logprobs, reason), r in zip(json.loads(line), expected, strict=True):
            assert (tokens, reason) == (r.tokens.tolist(), r.finish_reason)
            np.testing.assert_allclose(logprobs, r.logprobs, rtol=0, atol=1e-5)
    assert len(done.stdout.splitlines()) == 2
