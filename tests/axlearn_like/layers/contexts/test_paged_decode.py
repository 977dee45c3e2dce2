"""Decoding on the pages against attention in float64: rows of all lengths, any number of splits at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.attention.xla import Xla
from axlearn_like.layers.contexts.paged import NULL_PAGE, make_pool
from axlearn_like.layers.contexts.paged_decode import SPLIT, PagedDecodeContext
from mesh import UserError

pytestmark = pytest.mark.numerics

HEADS, WIDTH, PAGE, COLUMNS = (2, 3), 16, 16, 44
LENGTHS = (0, 1, 63, 255, 256, 257, 511, 700)  # tokens before those that are fed
PAGES = 2 + len(LENGTHS) * COLUMNS
LAYER = 1  # of two
SINKS = np.linspace(-1, 2, 6, dtype=np.float32).reshape(HEADS)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows in scrambled pages, and what follows in each; idle rows own nothing."""

    rules: ScoreRules = ScoreRules()
    chunk: int = 1
    shared: tuple[int, ...] = ()
    sinks: bool = False
    idle: tuple[int, ...] = ()


def rows_of(case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return queries, keys and values of all rows at full length, their counts and page tables.

    The rows of a tile have its first tokens in common, each in pages of its own.
    """
    rng, longest = np.random.default_rng(0), COLUMNS * PAGE
    rows = len(LENGTHS)
    q = rng.standard_normal((rows, case.chunk, *HEADS, WIDTH), np.float32)
    k, v = rng.standard_normal((2, rows, longest, HEADS[0], WIDTH), np.float32)
    tile = -(-rows // len(case.shared)) if case.shared else 1
    for index, keys in enumerate(case.shared):
        for x in (k, v):
            x[index * tile : (index + 1) * tile, :keys] = x[index * tile, :keys]
    counts = np.array([0 if row in case.idle else case.chunk for row in range(rows)], np.int32)
    table = rng.permutation(np.arange(1, 1 + rows * COLUMNS)).reshape(rows, COLUMNS).astype(np.int32)
    needed = -(-(np.array(LENGTHS) + case.chunk) // PAGE)
    return [q, k, v], counts, np.where(np.arange(COLUMNS) < needed[:, None], table, NULL_PAGE).astype(np.int32)


def pool_of(k: np.ndarray, v: np.ndarray, table: np.ndarray) -> Any:
    """Return a pool with the keys and values before the fed ones; all else holds large numbers, values NaN."""
    pool = make_pool(layers=2, pages=PAGES, page_size=PAGE, kv_heads=HEADS[0], head_dim=WIDTH, dtype=np.float32)
    keys, values = np.full(pool["k"].shape, 1e6, np.float32), np.full(pool["v"].shape, np.nan, np.float32)
    for row, length in enumerate(LENGTHS):
        for place in range(length):
            page = LAYER * PAGES + table[row, place // PAGE]
            keys[page, :, :, place % PAGE], values[page, :, place % PAGE] = k[row, place], v[row, place]
    return {"k": jnp.asarray(keys), "v": jnp.asarray(values)}


CASES = {
    "plain": Case(idle=(2, 7)),
    "drafts, cap and sinks": Case(ScoreRules(soft_cap=1.5, scale=0.6), chunk=3, sinks=True),
    "window": Case(ScoreRules(window=300)),
    "shared": Case(shared=(0, 256, 448), idle=(4,)),
    "window and shared": Case(ScoreRules(window=100), shared=(0, 192, 448)),
}
EVERY_RUN = (("plain", 4), ("drafts, cap and sinks", 4), ("window and shared", 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        pytest.param(name, n, marks=[pytest.mark.full] * ((name, n) not in EVERY_RUN))
        for name in CASES
        for n in (1, 4, 1000)
    ],
)
def test_every_row_sees_its_own_keys(name: str, at_once: int):
    case, lengths = CASES[name], list(LENGTHS)
    (q, k, v), counts, table = rows_of(case)
    new = [np.stack([x[row, length : length + case.chunk] for row, length in enumerate(lengths)]) for x in (k, v)]
    sharing: dict[str, Any] = {}
    if case.shared:
        sources = [3 * index + 2 - (index == 2) for index in range(3)]  # the longest of each tile
        sharing = {"shared": jnp.array(case.shared), "sources": jnp.array(sources), "tile": 3}
    split = SPLIT * 2 * HEADS[0] * WIDTH * 4  # bytes
    rows: Any = [jnp.asarray(x) for x in (table, lengths, counts)]
    context = PagedDecodeContext(*rows, chunk=case.chunk, pages=PAGES, at_once=at_once * split, **sharing)
    sinks = jnp.asarray(SINKS) if case.sinks else None
    params = AttentionParams(case.rules, Xla.Config().build(), AllGather.Config().build(), sinks)
    found, (pool, _) = jax.jit(lambda q, k, v, pool, layer: context.attend(q, k, v, (pool, layer), params))(
        q, *new, pool_of(k, v, table), jnp.int32(LAYER)
    )
    assert np.isfinite(found).all()
    for row, length in enumerate(lengths):
        if not counts[row]:
            continue
        for place in range(case.chunk):
            expected = attention64(case, q[row, place], k[row, : length + place + 1], v[row, : length + place + 1])
            np.testing.assert_allclose(found[row, place], expected, atol=2e-6)
        last = length + case.chunk - 1
        page = LAYER * PAGES + table[row, last // PAGE]
        np.testing.assert_array_equal(pool["v"][page, :, last % PAGE], v[row, last])


def attention64(case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return attention of one token [k, q, h] over the keys up to its own [s, k, h], in float64."""
    rules = case.rules
    first = 0 if rules.window is None else max(0, len(k) - rules.window)
    scores = np.einsum("kqh,skh->kqs", q.astype(np.float64), k[first:]) * rules.scale_of(WIDTH)
    if rules.soft_cap is not None:
        scores = rules.soft_cap * np.tanh(scores / rules.soft_cap)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True) + (np.exp(SINKS.astype(np.float64))[..., None] if case.sinks else 0)
    return np.einsum("kqs,skh->kqh", weights / total, v[first:])


@pytest.mark.slow
def test_attention_to_keys_to_come_is_refused():
    ones = jnp.ones((1, 1), jnp.int32)
    context = PagedDecodeContext(ones, ones[0], ones[0], chunk=1, pages=4)
    rules: Any = AttentionParams(ScoreRules(causal=False), Xla.Config().build(), AllGather.Config().build())
    pool = make_pool(layers=1, pages=4, page_size=PAGE, kv_heads=1, head_dim=8, dtype=jnp.float32)
    x = jnp.zeros((1, 1, 1, 8))
    with pytest.raises(UserError, match=r"Attention\.causal=False is not supported with a cache"):
        context.attend(x[:, :, None], x, x, (pool, jnp.int32(0)), rules)
