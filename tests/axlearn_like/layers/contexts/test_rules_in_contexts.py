"""Windows, soft caps, scales and sinks mean the same in every context: what numpy in float64 computes of whole rows."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.attention.xla import Xla
from axlearn_like.kernels.paged_attention import pages
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.contexts.cells import cells_needed, fill, make_window
from axlearn_like.layers.contexts.packed import GroupContext, PackedContext, PackedGroupContext
from axlearn_like.layers.contexts.paged import PagedContext, RowContext, make_pool
from axlearn_like.layers.contexts.window import Cache, WindowContext
from mesh import UserError, make_mesh
from tests.axlearn_like.kernels.attention import reference

pytestmark = pytest.mark.numerics

RULES = ScoreRules(window=6, soft_cap=1.5, scale=0.6)
ROWS, LENGTH, HEADS, WIDTH, PAGE = 2, 70, (2, 2), 8, 16
WHOLE = reference.inputs(batch=ROWS, length=LENGTH, heads=HEADS, width=WIDTH)._replace(
    segments=np.ones((ROWS, LENGTH), np.int32)
)
TABLE = np.random.default_rng(1).permutation(np.arange(1, 17)).reshape(ROWS, 8).astype(np.int32)
make_empty = partial(make_pool, layers=1, pages=17, page_size=PAGE, kv_heads=HEADS[0], head_dim=WIDTH)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return reference.attention(WHOLE, RULES, sinks=True)


def attention(**changes: Any) -> AttentionParams:
    rules = dataclasses.replace(RULES, **changes)
    return AttentionParams(rules, Xla.Config().build(), AllGather.Config().build(), jnp.asarray(WHOLE.sinks))


def mixed(context: Any, x: Any, cache: Any = None, **changes: Any) -> tuple[Any, Any]:
    params = attention(**changes)
    return jax.jit(lambda x, cache: context.attend(*x, cache, params))(tuple(x[:3]), cache)


def positions() -> jax.Array:
    return jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))


def test_scoring_in_rows(expected):
    found, _ = mixed(RowContext(positions()), WHOLE)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def prefilled(tokens: int) -> tuple[list[np.ndarray], Any]:
    """Return the outputs of chunks of 40 tokens, and the pool."""
    pool, found = make_empty(dtype=jnp.float32), []
    for start in range(0, tokens, 40):
        part = slice(start, min(start + 40, tokens))
        counts = jnp.full(ROWS, part.stop - start)
        table, starts = jnp.asarray(TABLE), jnp.full(ROWS, start)
        context: Any = PagedContext(table, starts, counts, chunk=part.stop - start, pages=17)
        out, (pool, _) = mixed(context, [x[:, part] for x in WHOLE[:3]], (pool, jnp.int32(0)))
        found.append(np.asarray(out))
    return found, pool


@pytest.mark.slow
def test_prefill_in_pages(expected):
    found, _ = prefilled(LENGTH)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=2e-5)


@pytest.mark.slow
def test_decoding_in_windows(expected):
    _, pool = prefilled(LENGTH - 1)
    lengths = jnp.full(ROWS, LENGTH - 1)
    windows = [make_window(ROWS, 128, kv_heads=HEADS[0], head_dim=WIDTH, dtype=jnp.float32)]
    needed = cells_needed(windows, lengths + 1)
    (windows,) = fill([windows], pool, [jnp.asarray(TABLE)], lengths, needed, [None])
    fresh = jnp.zeros((1, ROWS, HEADS[0], WIDTH))
    last = [jnp.asarray(x[:, -1:]) for x in WHOLE[:3]]
    context = WindowContext(lengths, needed, jnp.int32(0))
    found, _ = jax.jit(lambda cache: mixed(context, last, cache))(Cache(windows, fresh, fresh))
    np.testing.assert_allclose(found[:, 0], expected[:, -1], atol=2e-5)


@pytest.mark.slow
def test_groups_of_completions():
    lengths, prefix, completions, size = [5, 9], 9, 2, 7
    x = reference.inputs(batch=2, length=prefix + completions * size, heads=HEADS, width=WIDTH)
    context = GroupContext(jnp.asarray(lengths), prefix, completions, size)
    found, _ = mixed(context, x)
    for group, length in enumerate(lengths):
        for completion in range(completions):
            own = slice(prefix + completion * size, prefix + (completion + 1) * size)
            q, k, v = (np.concatenate([a[group, :length], a[group, own]])[None] for a in x[:3])
            one = reference.Inputs(q, k, v, np.ones((1, length + size), np.int32), WHOLE.sinks)
            expected = reference.attention(one, RULES, sinks=True)[0]
            np.testing.assert_allclose(found[group, own], expected[length:], atol=2e-5)
            np.testing.assert_allclose(found[group, :length], expected[:length], atol=2e-5)


@pytest.mark.slow
def test_packed_groups_of_completions():
    """Two prefixes of 5 and 9 tokens and completions of 7, 3 and 6 of them, each as in a row of its own."""
    lengths, pieces, prefix, size = [5, 9], [(1, 7), (0, 3), (1, 6)], 16, 20
    x = reference.inputs(batch=1, length=prefix + size, heads=HEADS, width=WIDTH)
    segments, places = np.r_[[1] * 5, [2] * 9, [0] * 2], np.r_[:5, :9, :2]
    body = np.zeros((3, size), np.int32)  # segments, positions, starts
    body[2, 16:], at, parts = 16, 0, []
    for group, length in pieces:
        part = slice(at, at + length)
        body[:, part] = np.stack([np.full(length, group + 1), lengths[group] + np.arange(length), np.full(length, at)])
        parts.append((group, prefix + np.arange(at, at + length)))
        at += length
    context = PackedGroupContext(
        *(jnp.asarray(a, jnp.int32)[None] for a in (segments, body[0], places, body[1], body[2]))
    )
    found, _ = mixed(context, x)
    for group, own in parts:
        where = np.r_[np.flatnonzero(segments == group + 1), own]
        q, k, v = (np.asarray(a)[:, where] for a in x[:3])
        one = reference.Inputs(q, k, v, np.ones((1, len(where)), np.int32), WHOLE.sinks)
        expected = reference.attention(one, RULES, sinks=True)[0]
        np.testing.assert_allclose(found[0, where], expected, atol=2e-5)


def test_a_cache_is_causal():
    with pytest.raises(UserError, match="Attention.causal=False is not supported with a cache"):
        mixed(RowContext(positions()), WHOLE, causal=False, window=None)


def test_the_paged_kernel_refuses_sinks():
    kernel = PagedKernel.Config().build()
    context = PagedContext(jnp.asarray(TABLE), jnp.zeros(2), jnp.ones(2), chunk=LENGTH, pages=17, kernel=kernel)
    with pytest.raises(UserError, match="Attention.sinks: the TPU kernel of paged attention does not support sinks"):
        mixed(context, WHOLE, (pages.make_pool(1, 17, 4, 2, 8), jnp.int32(0)))


@pytest.mark.parametrize("context", [RowContext(positions()), GroupContext(jnp.ones(2, jnp.int32), 10, 2, 30)])
def test_rows_that_are_cut_are_refused_by_contexts_that_need_them_whole(context):
    mesh = make_mesh({"sequence": 2}, jax.devices()[:1] * 2).abstract_mesh
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(UserError, match="sequence 2: .*Context needs complete rows"),
    ):
        jax.eval_shape(lambda q, k, v: mixed(context, (q, k, v))[0], *WHOLE[:3])


def test_packed_rows_end_where_their_segments_do():
    x = reference.inputs(batch=2, length=14, heads=HEADS, width=WIDTH)
    context = PackedContext(jnp.zeros((2, 14), jnp.int32), jnp.asarray(x.segments))
    found, _ = mixed(context, x)
    np.testing.assert_allclose(found, reference.attention(x._replace(sinks=WHOLE.sinks), RULES, sinks=True), atol=2e-5)
