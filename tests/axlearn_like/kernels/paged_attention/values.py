"""Values of paged attention, and of the pages that are written, with what is right in float64."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.exact.attention import exact_paged_attention
from axlearn_like.kernels.int8_heads import restore, round_heads
from axlearn_like.kernels.low_rank.attention import rank_space_attention
from axlearn_like.kernels.low_rank.factors import KeySteps, KeyValueFactors, make_rank_pool
from axlearn_like.kernels.paged_attention.cascade import cascade_attention
from axlearn_like.kernels.paged_attention.int8 import int8_attention, make_int8_kernel_pool
from axlearn_like.kernels.paged_attention.pages import make_pool, write_pages
from axlearn_like.kernels.paged_attention.ragged import ragged_attention
from axlearn_like.kernels.paged_attention.rows import PagedRows, RankRows, SharedTiles

PLAIN = ScoreRules()
Pairs = list[tuple[Any, Any]]  # (found, right)


def paged(
    *,
    lengths: list[int],
    heads: int,
    width: int,
    rules: ScoreRules = PLAIN,
    page: int = 8,
    shared: int = 0,
    exact: bool = False,
) -> Pairs:
    """One token of each row on pages, or on pages of which the first are shared; the last key is the token's own."""
    rng, rows, per_head = np.random.default_rng(0), len(lengths), 2
    pages = -(-max(lengths) // page)
    k, v = (rng.standard_normal((rows, pages * page, heads, width), np.float32) for _ in range(2))
    for x in (k, v):
        x[:, :shared] = x[0, :shared]
    q = rng.standard_normal((rows, 1, heads, per_head, width), np.float32)
    pool = np.array(make_pool(1, 1 + rows * pages, page, heads, width, jnp.float32))
    table = rng.permutation(np.arange(1, 1 + rows * pages)).reshape(rows, pages).astype(np.int32)
    for row, length in enumerate(lengths):
        for position in range(length - 1):
            slot = pool[table[row, position // page], position % page]
            slot[0::2, :width], slot[1::2, :width] = k[row, position], v[row, position]
    starts = np.maximum(np.array(lengths, np.int32) - 1, 0)
    counts = np.minimum(np.array(lengths, np.int32), 1)
    new = [np.take_along_axis(x, starts[:, None, None, None], axis=1) for x in (k, v)]
    tokens = PagedRows(*(jnp.asarray(x) for x in (q, *new, table, starts, counts)))
    tiles = SharedTiles(np.array([shared], np.int32), np.zeros(1, np.int32), rows)
    run = partial(cascade_attention, tiles=tiles) if shared else exact_paged_attention if exact else ragged_attention
    found = run(tokens, jnp.asarray(pool), rules=rules, interpret=True)[0]
    return [(found[row, 0], _attention(q[row, 0], k[row], v[row], end, rules)) for row, end in enumerate(lengths)]


def int8_paged(*, lengths: list[int], heads: int, width: int, rules: ScoreRules = PLAIN, page: int = 8) -> Pairs:
    """All but the last token of each row at once, then the last: against the rounded keys and values."""
    rng, rows, per_head = np.random.default_rng(0), len(lengths), 2
    pages = -(-max(lengths) // page)
    k, v = (jnp.asarray(rng.standard_normal((rows, pages * page, heads, width), np.float32)) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((rows, pages * page, heads, per_head, width), np.float32))
    pool = make_int8_kernel_pool(1, 1 + rows * pages, page, heads, width)
    table = jnp.asarray(rng.permutation(np.arange(1, 1 + rows * pages)).reshape(rows, pages), jnp.int32)
    last, alive = np.maximum(np.array(lengths) - 1, 0), np.minimum(lengths, 1)
    starts, lasts, counts = (jnp.asarray(x, jnp.int32) for x in (0 * last, last, alive))
    most = max(last)
    first = PagedRows(q[:, :most], k[:, :most], v[:, :most], table, starts, lasts)
    before, pool = int8_attention(first, pool, rules=rules, interpret=True)
    new = [x[np.arange(rows), last][:, None] for x in (q, k, v)]
    after, _ = int8_attention(
        PagedRows(new[0], new[1], new[2], table, lasts, counts), pool, rules=rules, interpret=True
    )
    k, v = (restore(*round_heads(x), jnp.float32) for x in (k, v))
    pairs = []
    for row, end in enumerate(lengths):
        parts = [(before[row, at], at + 1, at) for at in range(last[row])] + [(after[row, 0], end, last[row])]
        pairs += [(found, _attention(q[row, at], k[row], v[row], seen, rules)) for found, seen, at in parts]
    return pairs


def rank_space(
    *, lengths: list[int], heads: int, width: int, rank: int, rules: ScoreRules = PLAIN, page: int = 8
) -> Pairs:
    """All but the last token of each row at once, then the last, with keys and values of a rank; keys are rotated."""
    rng, rows, per_head = np.random.default_rng(0), len(lengths), 2
    pages = -(-max(lengths) // page)
    low = [rng.standard_normal((rows, pages * page, rank), np.float32) for _ in range(2)]
    matrices = [rng.standard_normal((rank, heads, width), np.float32) / rank**0.5 for _ in range(2)]
    q = jnp.asarray(rng.standard_normal((rows, pages * page, heads, per_head, width), np.float32))
    steps = KeySteps(tuple(100.0 ** (-i / width) for i in range(0, width, 2)), 1.0, None, False, width)
    factors = KeyValueFactors(matrices[0], matrices[1], None, None, None, steps)
    pool = make_rank_pool(1, 1 + rows * pages, page, rank, jnp.float32)["latent"]
    table = jnp.asarray(rng.permutation(np.arange(1, 1 + rows * pages)).reshape(rows, pages), jnp.int32)
    last, alive = np.maximum(np.array(lengths) - 1, 0), np.minimum(lengths, 1)
    starts, lasts, counts = (jnp.asarray(x, jnp.int32) for x in (0 * last, last, alive))
    most, attend = max(last), partial(rank_space_attention, rules=rules, interpret=True)
    k, v = map(jnp.asarray, low)
    before, pool = attend(RankRows(q[:, :most], k[:, :most], v[:, :most], table, starts, lasts), pool, factors)
    new = [x[np.arange(rows), last][:, None] for x in (q, k, v)]
    after, _ = attend(RankRows(new[0], new[1], new[2], table, lasts, counts), pool, factors)
    keys, values = (np.einsum("rsl,lkh->rskh", np.float64(x), b) for x, b in zip(low, matrices, strict=True))
    angles = np.arange(pages * page)[:, None, None] * np.array(steps.freq)
    turned = np.exp(1j * angles) * (keys[..., : width // 2] + 1j * keys[..., width // 2 :])
    keys = np.concatenate([turned.real, turned.imag], axis=-1)
    pairs = []
    for row, end in enumerate(lengths):
        parts = [(before[row, at], at + 1, at) for at in range(last[row])] + [(after[row, 0], end, last[row])]
        pairs += [(found, _attention(q[row, at], keys[row], values[row], seen, rules)) for found, seen, at in parts]
    return pairs


def written(*, starts: list[int], counts: list[int], heads: int, width: int, page: int) -> Pairs:
    """Pages after some new tokens of each row: tokens before and after them, and all other pages, stay as they were."""
    rng, rows, chunk = np.random.default_rng(0), len(starts), max(counts)
    pages = -(-max(start + count for start, count in zip(starts, counts, strict=True)) // page)
    q, k, v = (rng.standard_normal((rows, chunk, heads, *x, width), np.float32) for x in ((2,), (), ()))
    shape = make_pool(1, 1 + rows * pages, page, heads, width, jnp.float32).shape
    before = rng.standard_normal(shape, np.float32)
    table = rng.permutation(np.arange(1, 1 + rows * pages)).reshape(rows, pages).astype(np.int32)
    right = before.copy()
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for token in range(count):
            slot = right[table[row, (start + token) // page], (start + token) % page]
            slot[:] = 0  # of the width beyond the heads', too
            slot[0::2, :width], slot[1::2, :width] = k[row, token], v[row, token]
    numbers = (jnp.asarray(x, jnp.int32) for x in (table, starts, counts))
    return [(write_pages(jnp.asarray(before), PagedRows(*map(jnp.asarray, (q, k, v)), *numbers), True), right)]


def _attention(q_kqh: Any, k_skh: Any, v_skh: Any, end: int, rules: ScoreRules) -> Any:
    """Return attention in float64 to the keys before `end`, of the token there; zeros if there are none."""
    seen = slice(max(0, end - (rules.window or end)), end)
    keys, values, q = (np.asarray(x, np.float64) for x in (k_skh[seen], v_skh[seen], q_kqh))
    if not end:
        return np.zeros_like(q)
    scores = np.einsum("kqh,skh->kqs", q, keys) * rules.scale_of(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kqs,skh->kqh", weights / weights.sum(-1, keepdims=True), values)
