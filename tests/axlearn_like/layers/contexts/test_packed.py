"""Every context computes what plain causal attention over the unshared sequence computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind
from axlearn_like.layers.contexts.packed import GroupContext, PackedContext, PackedGroupContext
from tests.axlearn_like.layers.small import initialise, small_decoder

pytestmark = pytest.mark.numerics

PROMPTS = [[3, 5, 7, 11, 2], [4, 1], [9, 9, 8, 7, 6, 5]]
COMPLETIONS, SIZE, PREFIX = 3, 4, 7
GRAPHDEF, PARAMS = initialise(small_decoder())


@jax.jit
def logits_of(tokens, context):
    return bind(GRAPHDEF, PARAMS)(tokens, context)


@pytest.fixture(scope="module")
def completions():
    return np.random.default_rng(0).integers(0, 40, (len(PROMPTS), COMPLETIONS, SIZE)).astype(np.int32)


@pytest.fixture(scope="module")
def expected(completions) -> np.ndarray:
    """Logits [group, completion, step, vocab] from a plain forward pass over each whole sequence: the reference."""
    length = max(map(len, PROMPTS)) + SIZE - 1
    rows = np.zeros((len(PROMPTS) * COMPLETIONS, length), np.int32)
    for row, (prompt, completion) in enumerate(
        (p, b) for p, group in zip(PROMPTS, completions, strict=True) for b in group
    ):
        rows[row, : len(prompt) + SIZE - 1] = [*prompt, *completion[:-1]]
    # Tokens that follow a row are padding behind its end: causal attention does not see it.
    positions = np.broadcast_to(np.arange(length), rows.shape)
    logits = np.asarray(logits_of(rows, PackedContext(jnp.asarray(positions), jnp.ones(rows.shape, jnp.int32))))
    logits = logits.reshape(len(PROMPTS), COMPLETIONS, length, -1)
    return np.stack([group[:, len(p) - 1 : len(p) + SIZE - 1] for p, group in zip(PROMPTS, logits, strict=True)])


def prefixes():
    prefix = np.zeros((len(PROMPTS), PREFIX), np.int32)
    for row, prompt in enumerate(PROMPTS):
        prefix[row, : len(prompt) - 1] = prompt[:-1]
    lengths = np.asarray([len(p) - 1 for p in PROMPTS], np.int32)
    last = np.asarray([p[-1] for p in PROMPTS], np.int32)
    return jnp.asarray(prefix), jnp.asarray(lengths), last


def completion_inputs(last, completions):
    first = np.repeat(last[:, None, None], COMPLETIONS, axis=1)
    return np.concatenate([first, completions[:, :, :-1]], axis=2)


def group_logits(prefix, lengths, last, completions) -> np.ndarray:
    """[group, completion, step, vocab] from one pass over prefix and completions."""
    inputs = completion_inputs(last, completions).reshape(len(PROMPTS), -1)
    logits = logits_of(jnp.concatenate([prefix, inputs], axis=1), GroupContext(lengths, PREFIX, COMPLETIONS, SIZE))
    return np.asarray(logits)[:, PREFIX:].reshape(len(PROMPTS), COMPLETIONS, SIZE, -1)


@pytest.mark.slow
def test_group_equals_unshared_forward(completions, expected):
    np.testing.assert_allclose(group_logits(*prefixes(), completions), expected, atol=6e-5)


@pytest.mark.slow
def test_packed_segments_do_not_see_each_other():
    rows = [[1, 2, 3, 4], [5, 6, 7]]
    packed = np.array([[*rows[0], *rows[1], 0], [*rows[0], 0, 0, 0, 0], [*rows[1], 0, 0, 0, 0, 0]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0], range(8), range(8)])
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]])
    context = PackedContext(jnp.asarray(positions), jnp.asarray(segments))
    together, first, second = np.asarray(logits_of(packed, context))
    np.testing.assert_allclose(together[:4], first[:4], atol=6e-5)
    np.testing.assert_allclose(together[4:7], second[:3], atol=6e-5)


def test_padding_of_the_prefix_changes_nothing(completions):
    prefix, lengths, last = prefixes()
    other = jnp.where(jnp.arange(PREFIX) < lengths[:, None], prefix, 39)
    outs = [group_logits(t, lengths, last, completions) for t in (prefix, other)]
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.slow
def test_packed_groups_equal_unshared_forward(completions, expected):
    """All three prompts in one row, then completions of different lengths in any order, and padding."""
    size, order = 20, [(1, 0, 4), (0, 2, 3), (2, 1, 1), (0, 0, 4), (1, 2, 2), (2, 0, 3)]
    _, lengths, last = prefixes()
    prefix = np.zeros((3, 1, size), np.int32)  # tokens, segments, positions
    at = 0
    for group, prompt in enumerate(PROMPTS):
        part = slice(at, at + len(prompt) - 1)
        prefix[:, 0, part] = prompt[:-1], [group + 1] * (len(prompt) - 1), range(len(prompt) - 1)
        at = part.stop
    body = np.zeros((4, 1, 18), np.int32)  # tokens, segments, positions, starts
    body[3, 0, 17:] = 17
    at, inputs, places = 0, completion_inputs(last, completions), {}
    for group, sample, length in order:
        places[group, sample] = part = slice(at, at + length)
        body[:3, 0, part] = (
            inputs[group, sample, :length],
            [group + 1] * length,
            int(lengths[group]) + np.arange(length),
        )
        body[3, 0, part] = at
        at += length
    context = PackedGroupContext(*map(jnp.asarray, (prefix[1], body[1], prefix[2], body[2], body[3])))
    logits = np.asarray(logits_of(np.concatenate([prefix[0], body[0]], axis=1), context))[0, size:]
    for group, sample, length in order:
        np.testing.assert_allclose(logits[places[group, sample]], expected[group, sample, :length], atol=6e-5)
