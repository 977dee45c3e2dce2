"""An update by packed rows against one by padded rows and against each rollout computed by itself."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.learner import AdamW, Constant, Learner, ParameterGroup
from axlearn_like.training.losses import token_logprobs
from axlearn_like.training.step import AccumulatedStep, init_state, make_train_step
from rl.objective import Objective, TruncatedImportance
from rl.objective.presets import dapo, grpo, gspo
from rl.protocol.headers import header_of
from rl.protocol.messages import Group as Rollouts
from rl.protocol.messages import contents_of
from rl.training.batching import PackedRows, arrange, fill_packed
from rl.training.batching.arrays import packed_arrays
from rl.training.packing import Packing
from rl.training.program import added_arrays, make_packed_loss, make_policy_loss
from rl.training.spec import UpdateSpec
from tests.rl.tiny import make_group, make_prompt, tiny_params, tiny_policy
from tests.rl.training.whole_groups import pack_groups

pytestmark = pytest.mark.numerics

MAX_PROMPT, MAX_NEW, TEMPERATURE = 12, 8, 0.7
POLICY = tiny_policy()
PACKING = Packing.Config(lengths=(20, 8), rows=2, completions=5)
ONE_LENGTH = PACKING.clone(lengths=(20,))  # each length is compiled for itself


def graphdef(policy: Decoder.Config = POLICY) -> Any:
    return split(build_abstract(policy))[0]


@functools.cache
def parameters() -> Params:
    return tiny_params(POLICY)


def groups() -> list[Rollouts]:
    """Five prompts with four completions each of 1 to 8 tokens, a tool's answer in one of them."""
    rng = np.random.default_rng(3)
    made = [
        make_group(
            make_prompt(g, 1 + 2 * g), [rng.integers(0, 256, rng.integers(1, 9)) for _ in range(4)], rng.uniform(size=4)
        )
        for g in range(5)
    ]
    made[2].rollouts[1].action_mask[:1] = False
    return made


def microbatches(
    objective: Objective, chunks: int = 1, rows: Packing.Config = PACKING
) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
    packing = rows.build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, chunks=chunks)
    arranged = arrange([header_of(group) for group in groups()], objective, PackedRows(packing))
    contents = contents_of(groups())
    filled = [fill_packed(one.rows, one.length, arranged.prepared, contents, packing) for one in arranged.microbatches]
    for batch, one in zip(filled, arranged.microbatches, strict=True):
        described = packed_arrays(added_arrays(objective, 4), packing, rows=2, length=one.length)
        assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {
            n: (a.shape, a.dtype) for n, a in described.items()
        }
    return filled, arranged.figures


@functools.cache
def plain_rows() -> tuple[Any, Any]:
    """Log-probabilities [5, 4, MAX_NEW] with every rollout in a row of its own behind its prompt; and their vjp."""
    length = MAX_PROMPT + MAX_NEW
    rollouts = [(group.prompt.tokens, rollout.tokens) for group in groups() for rollout in group.rollouts]
    whole, first = np.zeros((len(rollouts), length + 1), np.int32), [len(prompt) - 1 for prompt, _ in rollouts]
    for row, (prompt, tokens) in enumerate(rollouts):
        whole[row, : len(prompt) + len(tokens)] = np.concatenate([prompt, tokens])
    index = np.minimum(np.asarray(first)[:, None] + np.arange(MAX_NEW), length - 1)

    def logprobs(params: Any) -> jax.Array:
        # Tokens that follow a rollout are behind its end: causal attention does not see it.
        context = PackedContext(jnp.broadcast_to(jnp.arange(length), (20, length)), jnp.ones((20, length), jnp.int32))
        logits = bind(graphdef(), params)(jnp.asarray(whole[:, :-1]), context) / TEMPERATURE
        found = token_logprobs(logits, jnp.asarray(whole[:, 1:]))
        return jnp.take_along_axis(found, index, axis=1).reshape(5, 4, MAX_NEW)

    return jax.jit(logprobs)(parameters()), jax.jit(lambda slopes: jax.vjp(logprobs, parameters())[1](slopes)[0])


def reference(objective: Objective) -> tuple[float, Any]:
    """Loss and gradient of the whole batch, a plain row for each rollout."""
    made = groups()
    behaviour, mask = np.zeros((5, 4, MAX_NEW), np.float32), np.zeros((5, 4, MAX_NEW), bool)
    for g, group in enumerate(made):
        for n, rollout in enumerate(group.rollouts):
            mask[g, n, : len(rollout.tokens)] = rollout.action_mask
            behaviour[g, n, : len(rollout.tokens)] = rollout.logprobs
    rewards = np.asarray([[score.reward for score in group.scores] for group in made])
    batch = {**objective.prepare(rewards, mask).arrays, "action_mask": mask, "logprobs_behaviour": behaviour}
    logprobs, vjp = plain_rows()
    value, slopes = jax.value_and_grad(lambda x: objective.loss(x, batch)[0])(logprobs)
    return float(value), vjp(slopes)


@functools.cache
def compiled(loss: Any) -> Any:
    """The jitted loss with its gradient, one for all calls with the same loss."""
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def summed(loss: Any, batches: list[Any]) -> tuple[dict[str, float], Any]:
    """Metrics and gradient of batches, added up in float64."""
    metrics: dict[str, float] = {}
    gradient = jax.tree.map(lambda x: np.zeros(x.shape, np.float64), parameters())
    compute = compiled(loss)
    for batch in batches:
        (_, found), slopes = compute(parameters(), batch)
        for name, value in found.items():
            old = metrics.get(name, -np.inf if name.endswith("_max") else 0.0)
            metrics[name] = max(old, float(value)) if name.endswith("_max") else old + float(value)
        gradient = jax.tree.map(lambda t, s: t + np.asarray(s, np.float64), gradient, slopes)
    return metrics, gradient


def assert_close(found: Any, expected: Any) -> None:
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert scale > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), found, expected)


OBJECTIVES: Mapping[str, Objective.Config] = {
    "grpo": grpo().set(old_policy="current", importance=TruncatedImportance.Config(cap=2.0)),
    "dapo": dapo().set(old_policy="current"),
    "gspo": gspo().set(old_policy="current"),  # a ratio of whole completions
    "drop": grpo().set(old_policy="behaviour", zero_variance="drop", truncated="mask"),
}


MUTATIONS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "rollouts see the prompts of others": lambda batch: {
        name: np.minimum(batch[name], 1) for name in ("segments", "prefix_segments")
    },
    "rollouts of a prompt see each other": lambda batch: {"starts": np.zeros_like(batch["starts"])},
    "positions go on from rollout to rollout": lambda batch: {
        "positions": np.broadcast_to(np.arange(batch["positions"].shape[1], dtype=np.int32), batch["positions"].shape)
    },
}


@pytest.mark.full  # of one that has metrics too in every run, below
@pytest.mark.parametrize("name", ["gspo", "drop"])
def test_packed_rows_have_the_gradient_of_each_rollout_by_itself(name: str):
    objective = OBJECTIVES[name].build()
    value, expected = reference(objective)
    batches, _ = microbatches(objective)
    assert {batch["inputs"].shape for batch in batches} == {(2, 20), (2, 8)}, "rows of both lengths"
    metrics, gradient = summed(
        make_packed_loss(graphdef(), objective, UpdateSpec(TEMPERATURE, max_new_tokens=MAX_NEW)), batches
    )
    assert metrics["loss"] == pytest.approx(value, abs=1e-5)
    assert_close(gradient, expected)


@pytest.mark.slow
def test_packed_rows_have_the_metrics_and_the_gradient_of_padded_ones():
    objective = OBJECTIVES["grpo"].build()
    batches, figures = microbatches(objective, chunks=4, rows=ONE_LENGTH)
    padded, others = pack_groups(groups(), objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    expected, slopes = summed(make_policy_loss(graphdef(), objective, UpdateSpec(TEMPERATURE)), [padded])
    loss = make_packed_loss(graphdef(), objective, UpdateSpec(TEMPERATURE, chunks=4, max_new_tokens=MAX_NEW))
    metrics, gradient = summed(loss, batches)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_close(gradient, slopes)
    for name, change in MUTATIONS.items():  # which the comparison must see
        wrong = summed(loss, [{**batch, **change(batch)} for batch in batches])[1]
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_close(wrong, slopes)
            pytest.fail(f"{name} is not seen")
    tokens = sum(len(r.tokens) for group in groups() for r in group.rollouts) + sum(2 * g for g in range(5))
    computed = sum(batch["inputs"].size + batch["prefix"].size for batch in batches)
    assert figures["wasted_tokens"] == pytest.approx(1 - tokens / computed)
    assert others["wasted_tokens"] == pytest.approx(1 - tokens / (padded["inputs"].size + padded["prefix"].size))
    assert {n: v for n, v in figures.items() if "tokens" not in n} == {
        n: v for n, v in others.items() if "tokens" not in n
    }


def test_what_is_learned_from_nothing_is_left_out():
    """A group of equal rewards is in no row, nor is a rollout that the verifier failed on."""
    objective = OBJECTIVES["drop"].build()
    made = groups()
    tokens = {int(t) for batch in microbatches(objective)[0] for t in batch["lengths"].ravel() if t}
    assert tokens == {len(r.tokens) for group in made for r in group.rollouts}
    equal = [make_group(make_prompt(1), [[1, 2], [3]], [0.5, 0.5]), make_group(make_prompt(2), [[4], [5]], [0.0, 1.0])]
    packing = PACKING.build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    arranged = arrange(list(map(header_of, equal)), objective, PackedRows(packing))
    assert [row for one in arranged.microbatches for row in one.rows] == [((1, (0, 1)),), ()]


@pytest.mark.full
def test_the_step_is_that_of_all_microbatches_at_once():
    """The same update as by padded rows: parameters, metrics; and what LoRA freezes stays."""
    policy, objective = tiny_policy(), OBJECTIVES["dapo"].build()
    assert isinstance(policy.block, Block.Config)
    policy.block.attention = LoRA.Config(inner=policy.block.attention, rank=2)
    learner = Learner.Config(
        optimizer=AdamW.Config(eps=1e-2),
        schedule=Constant.Config(lr=1e-2),
        clip_norm=1.0,
        groups=(ParameterGroup.Config(match="*/lora/*"), ParameterGroup.Config(frozen=True)),
    ).build()
    made, params = graphdef(policy), tiny_params(policy)
    batches, _ = microbatches(objective, rows=ONE_LENGTH)
    assert len(batches) > 1
    padded, _ = pack_groups(groups(), objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    step = AccumulatedStep(make_packed_loss(made, objective, UpdateSpec(TEMPERATURE, max_new_tokens=MAX_NEW)), learner)
    plain = make_train_step(make_policy_loss(made, objective, UpdateSpec(TEMPERATURE)), learner)
    new, metrics = step(init_state(jax.tree.map(jnp.array, params), learner), batches)
    expected, others = plain(init_state(jax.tree.map(jnp.array, params), learner), padded)
    assert int(new["step"]) == 1
    assert metrics.keys() == others.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, others[name], rtol=1e-4, atol=1e-6, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), new["params"], expected["params"])
    moved = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, a), b in zip(jax.tree.leaves_with_path(new["params"]), jax.tree.leaves(params), strict=True)
        if np.abs(np.asarray(a) - b).max() > 1e-4
    ]
    assert moved and all("lora" in name for name in moved)
