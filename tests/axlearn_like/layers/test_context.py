"""Every context computes what plain causal attention over the unshared sequence computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind
from axlearn_like.layers.context import (
    BranchContext,
    GroupContext,
    PackedContext,
    TrunkContext,
    branch_cache,
)
from tests.axlearn_like.layers.small import initialise, small_decoder

PROMPTS = [[3, 5, 7, 11, 2], [4, 1], [9, 9, 8, 7, 6, 5]]
BRANCHES, SIZE, TRUNK = 3, 4, 7


@pytest.fixture(scope="module")
def model():
    return bind(*initialise(small_decoder()))


@pytest.fixture(scope="module")
def branches():
    return np.random.default_rng(0).integers(0, 40, (len(PROMPTS), BRANCHES, SIZE)).astype(np.int32)


def full_logits(model, prompt, branch) -> np.ndarray:
    """Logits of one branch from a plain forward pass over the whole sequence: the reference."""
    row = jnp.asarray([prompt + branch[:-1].tolist()])
    length = row.shape[1]
    context = PackedContext(jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
    return np.asarray(model(row, context))[0, len(prompt) - 1 :]


def trunks():
    trunk = np.zeros((len(PROMPTS), TRUNK), np.int32)
    for row, prompt in enumerate(PROMPTS):
        trunk[row, : len(prompt) - 1] = prompt[:-1]
    lengths = np.asarray([len(p) - 1 for p in PROMPTS], np.int32)
    last = np.asarray([p[-1] for p in PROMPTS], np.int32)
    return jnp.asarray(trunk), jnp.asarray(lengths), last


def branch_inputs(last, branches):
    first = np.repeat(last[:, None, None], BRANCHES, axis=1)
    return np.concatenate([first, branches[:, :, :-1]], axis=2)


def test_group_equals_unshared_forward(model, branches):
    trunk, lengths, last = trunks()
    inputs = branch_inputs(last, branches).reshape(len(PROMPTS), -1)
    context = GroupContext(lengths, TRUNK, BRANCHES, SIZE)
    logits = model(jnp.concatenate([trunk, inputs], axis=1), context)[:, TRUNK:]
    logits = np.asarray(logits).reshape(len(PROMPTS), BRANCHES, SIZE, -1)
    for g, prompt in enumerate(PROMPTS):
        for n in range(BRANCHES):
            expected = full_logits(model, prompt, branches[g, n])
            np.testing.assert_allclose(logits[g, n], expected, atol=2e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_decode_equals_full_forward(model, branches, stacked):
    trunk, lengths, last = trunks()
    positions = jnp.broadcast_to(jnp.arange(TRUNK), trunk.shape)
    _, prefilled = model.hidden(trunk, TrunkContext(positions))
    if stacked:
        cache = jax.vmap(lambda layer: branch_cache(layer, BRANCHES, SIZE))(prefilled)
    else:
        layers = [jax.tree.map(lambda x, i=i: x[i], prefilled) for i in range(model.num_layers)]
        cache = tuple(branch_cache(layer, BRANCHES, SIZE) for layer in layers)
    inputs = branch_inputs(last, branches)
    steps = []
    for t in range(SIZE):
        context = BranchContext(lengths, jnp.int32(t), BRANCHES)
        hidden, cache = model.hidden(jnp.asarray(inputs[:, :, t]), context, cache)
        steps.append(np.asarray(model.logits(hidden)))
    for g, prompt in enumerate(PROMPTS):
        for n in range(BRANCHES):
            expected = full_logits(model, prompt, branches[g, n])
            got = np.stack([step[g, n] for step in steps])
            np.testing.assert_allclose(got, expected, atol=2e-5)


def test_packed_segments_do_not_see_each_other(model):
    rows = [[1, 2, 3, 4], [5, 6, 7]]
    packed = jnp.asarray([rows[0] + rows[1] + [0]])
    positions = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 0]])
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0]])
    together = np.asarray(model(packed, PackedContext(positions, segments)))[0]
    for row, start in zip(rows, (0, 4), strict=True):
        n = len(row)
        alone = PackedContext(jnp.arange(n)[None], jnp.ones((1, n), jnp.int32))
        expected = np.asarray(model(jnp.asarray([row]), alone))[0]
        np.testing.assert_allclose(together[start : start + n], expected, atol=2e-5)


def test_padding_of_the_trunk_changes_nothing(model, branches):
    trunk, lengths, last = trunks()
    inputs = branch_inputs(last, branches).reshape(len(PROMPTS), -1)
    context = GroupContext(lengths, TRUNK, BRANCHES, SIZE)
    other = jnp.where(jnp.arange(TRUNK) < lengths[:, None], trunk, 39)
    outs = [model(jnp.concatenate([t, inputs], axis=1), context)[:, TRUNK:] for t in (trunk, other)]
    np.testing.assert_array_equal(*map(np.asarray, outs))
