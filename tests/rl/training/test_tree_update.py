"""An update by rows of trees against each rollout computed by itself; trees of any shape."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.layers.base import bind
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.training.losses import token_logprobs
from rl.objective.presets import gspo
from rl.protocol.headers import header_of
from rl.protocol.messages import Group, contents_of
from rl.training.batching import Arranged, PackedRows, arrange, fill_packed
from rl.training.batching.arrays import packed_arrays
from rl.training.packing import Packing
from rl.training.program import added_arrays, make_packed_loss, policy_logprobs
from rl.training.spec import UpdateSpec
from tests.rl.tiny import make_group, make_prompt
from tests.rl.training.test_packed_update import TEMPERATURE, assert_close, graphdef, parameters

pytestmark = pytest.mark.numerics

GROUPS, SAMPLES, MAX_PROMPT, MAX_NEW = 3, 5, 6, 7
LENGTHS = (20, 8)
OBJECTIVE = gspo().set(old_policy="current").build()  # a ratio of whole completions


@functools.cache
def packing() -> Packing:
    return Packing.Config(lengths=LENGTHS, rows=2, completions=6, tree=True).build(
        max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW
    )


def forked(rng: np.random.Generator) -> list[np.ndarray]:
    """Rollouts that fork from earlier ones, or begin by themselves; some are equal, some others' beginnings."""
    made: list[np.ndarray] = []
    for _ in range(SAMPLES):
        trunk = made[rng.integers(len(made))] if made else np.zeros(0, int)
        kept = trunk[: rng.integers(0, len(trunk) + 1)]
        more = rng.integers(0, 3, rng.integers(0 if len(kept) else 1, MAX_NEW - len(kept) + 1))
        made.append(np.concatenate([kept, more]).astype(int))
    return made


def make_groups(seed: int) -> list[Group]:
    rng = np.random.default_rng(seed)
    made = [make_group(make_prompt(g, 1 + 2 * g), forked(rng), rng.uniform(size=SAMPLES)) for g in range(GROUPS)]
    for group in made:  # a tool's answer in one of them, which the other rollouts have drawn
        group.rollouts[0].action_mask[: len(group.rollouts[0].tokens) // 2] = False
    return made


def arranged_of(groups: list[Group]) -> Arranged:
    headers = [header_of(group) for group in groups]
    return arrange(headers, OBJECTIVE, PackedRows(packing()))


def filled(groups: list[Group]) -> tuple[Arranged, list[dict[str, np.ndarray]]]:
    arranged, contents = arranged_of(groups), contents_of(groups)
    rows = [fill_packed(one.rows, one.length, arranged.prepared, contents, packing()) for one in arranged.microbatches]
    return arranged, rows


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_every_path_reads_its_rollout_and_no_token_is_in_a_row_twice(seed: int):
    groups = make_groups(seed)
    arranged, batches = filled(groups)
    placed = [(g, n) for one in arranged.microbatches for row in one.rows for g, rollouts in row for n in rollouts]
    assert sorted(placed) == [(g, n) for g in range(GROUPS) for n in range(SAMPLES)]
    used = 0
    for microbatch, batch in zip(arranged.microbatches, batches, strict=True):
        described = packed_arrays(added_arrays(OBJECTIVE, SAMPLES), packing(), rows=2, length=microbatch.length)
        assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {
            n: (a.shape, a.dtype) for n, a in described.items()
        }
        for r, row in enumerate(microbatch.rows):
            seen = set[tuple[int, ...]]()
            read: list[tuple[int, bytes, bytes]] = []
            for index, size in enumerate(batch["lengths"][r]):
                path = batch["paths"][r, index, :size]
                if size:
                    g = row[batch["segments"][r, path[0]] - 1][0]
                    prompt, tokens = groups[g].prompt.tokens, batch["targets"][r, path]
                    whole = np.concatenate([prompt, tokens])
                    np.testing.assert_array_equal(batch["inputs"][r, path], whole[len(prompt) - 1 : -1])
                    np.testing.assert_array_equal(batch["positions"][r, path], len(prompt) - 1 + np.arange(size))
                    inside = [int(i) for i in range(path[-1] + 1) if batch["ends"][r, i] > path[-1]]
                    assert inside == list(path), "the ancestors of the last token are its path"
                    mask = batch["action_mask"][r, index, :size]
                    read.append((g, tokens.tobytes(), mask.tobytes()))
                    seen |= {(g, *tokens[: i + 1]) for i in range(size)}
            rollouts = [(g, groups[g].rollouts[n]) for g, chosen in row for n in chosen]
            assert sorted(read) == sorted((g, one.tokens.tobytes(), one.action_mask.tobytes()) for g, one in rollouts)
            assert np.count_nonzero(batch["segments"][r]) == len(seen), "as many tokens as the trie has"
            used += len(seen)
    total = sum(len(rollout.tokens) for group in groups for rollout in group.rollouts)
    trie = {
        (g, *r.tokens[: i + 1]) for g, group in enumerate(groups) for r in group.rollouts for i in range(len(r.tokens))
    }
    assert len(trie) <= used < total
    assert arranged.figures["shared_tokens"] == pytest.approx(1 - len(trie) / total)


@functools.cache
def plain_rows() -> Any:
    """Return the jitted log-probabilities [rollouts, MAX_NEW] with every rollout behind its prompt, and their vjp."""
    length = MAX_PROMPT + MAX_NEW

    def logprobs(params: Any, whole: jax.Array, first: jax.Array) -> jax.Array:
        count = len(whole)
        places = jnp.broadcast_to(jnp.arange(length), (count, length))
        context = PackedContext(places, jnp.ones((count, length), jnp.int32))
        logits = bind(graphdef(), params)(whole[:, :-1], context) / TEMPERATURE
        index = jnp.minimum(first[:, None] + jnp.arange(MAX_NEW), length - 1)
        return jnp.take_along_axis(token_logprobs(logits, whole[:, 1:]), index, axis=1)

    def loss(params: Any, whole: jax.Array, first: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        found = logprobs(params, whole, first).reshape(GROUPS, SAMPLES, MAX_NEW)
        return OBJECTIVE.loss(found, batch)[0], found

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def by_itself(groups: list[Group]) -> Any:
    """Return loss, log-probabilities and gradient of the whole batch, a row for each rollout."""
    length = MAX_PROMPT + MAX_NEW
    whole = np.zeros((GROUPS * SAMPLES, length + 1), np.int32)
    mask, behaviour = np.zeros((GROUPS, SAMPLES, MAX_NEW), bool), np.zeros((GROUPS, SAMPLES, MAX_NEW), np.float32)
    first = np.repeat([len(group.prompt.tokens) - 1 for group in groups], SAMPLES)
    for g, group in enumerate(groups):
        for n, rollout in enumerate(group.rollouts):
            row = np.concatenate([group.prompt.tokens, rollout.tokens])
            whole[g * SAMPLES + n, : len(row)] = row
            mask[g, n, : len(rollout.tokens)] = rollout.action_mask
            behaviour[g, n, : len(rollout.tokens)] = rollout.logprobs
    rewards = np.asarray([[score.reward for score in group.scores] for group in groups])
    batch = {**OBJECTIVE.prepare(rewards, mask).arrays, "action_mask": mask, "logprobs_behaviour": behaviour}
    return plain_rows()(parameters(), whole, first, batch)


@functools.cache
def tree_rows() -> Any:
    loss = make_packed_loss(graphdef(), OBJECTIVE, UpdateSpec(TEMPERATURE, max_new_tokens=MAX_NEW))

    def logprobs(params: Any, batch: Any) -> jax.Array:
        return policy_logprobs(bind(graphdef(), params), batch, UpdateSpec(TEMPERATURE)).logprobs

    def both(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(loss, has_aux=True)(params, batch), logprobs(params, batch)

    return jax.jit(both)


def in_order(group: Group, chosen: tuple[int, ...]) -> list[int]:
    return sorted(chosen, key=lambda n: list(group.rollouts[n].tokens))


@pytest.mark.full
@given(st.integers(0, 100_000))
@settings(max_examples=40, deadline=None)
def test_log_probabilities_and_gradient_are_those_of_each_rollout_by_itself(seed: int):
    groups = make_groups(seed)
    arranged, batches = filled(groups)
    (value, logprobs), expected = by_itself(groups)
    total, gradient = 0.0, jax.tree.map(lambda x: np.zeros(x.shape, np.float64), parameters())
    for microbatch, batch in zip(arranged.microbatches, batches, strict=True):
        ((loss, _), slopes), found = tree_rows()(parameters(), batch)
        total += float(loss)
        gradient = jax.tree.map(lambda t, s: t + np.asarray(s, np.float64), gradient, slopes)
        for r, row in enumerate(microbatch.rows):
            order = [(g, n) for g, chosen in row for n in in_order(groups[g], chosen)]
            for index, (g, n) in enumerate(order):
                size = len(groups[g].rollouts[n].tokens)
                np.testing.assert_allclose(found[r, index, :size], np.asarray(logprobs)[g, n, :size], atol=1e-5)
    assert total == pytest.approx(float(value), abs=1e-5)
    assert_close(gradient, expected)
