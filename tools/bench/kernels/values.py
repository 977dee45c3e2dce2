"""Values of the kernels for TPUs, simulated on this CPU, against float64: at shapes that have broken other kernels.

Each case returns what a kernel gives and what is right; its error is the largest difference, relative to the largest
right value.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.exact.attention import exact_paged_attention
from axlearn_like.kernels.exact.matmul import exact_matmul
from axlearn_like.kernels.exact.row_sums import exact_row_sums
from axlearn_like.kernels.int8_heads import restore, round_heads
from axlearn_like.kernels.low_rank_ffn import GLUFactors, by_kernel
from axlearn_like.kernels.paged_attention.cascade import cascade_attention
from axlearn_like.kernels.paged_attention.int8 import int8_attention
from axlearn_like.kernels.paged_attention.int8_scales import make_int8_kernel_pool
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.ragged import ragged_attention
from axlearn_like.kernels.paged_attention.rows import PagedRows, SharedTiles
from axlearn_like.kernels.policy_head.statistics import policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules

PLAIN = ScoreRules()
Pairs = list[tuple[Any, Any]]  # (found, right)


def errors() -> dict[str, float]:
    """Return the error of each case, by name."""
    return {name: max(_error(found, right) for found, right in case()) for name, case in CASES.items()}


def _error(found: Any, right: Any) -> float:
    found, right = np.asarray(found, np.float64), np.asarray(right, np.float64)
    return float(np.max(np.abs(found - right)) / max(1e-30, np.max(np.abs(right))))


def _paged(
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


def _exact_product(*, rows: int, depth: int, columns: int) -> Pairs:
    """A product, and the sums of its rows' squares, by the kernels of fixed order."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape, np.float32) for shape in ((rows, depth), (depth, columns)))
    right = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    product = exact_matmul(jnp.asarray(x), jnp.asarray(weight), interpret=True)
    table = exact_matmul(jnp.asarray(x), jnp.asarray(weight.T), table=True, interpret=True)
    sums = exact_row_sums(jnp.asarray(x), squares=True, interpret=True)
    squares = np.sum(np.asarray(x, np.float64) ** 2, axis=1, keepdims=True)
    return [(product, right), (table, right), (sums, squares)]


def _attention(q_kqh: Any, k_skh: Any, v_skh: Any, end: int, rules: ScoreRules) -> Any:
    """Return attention in float64 to the keys before `end`, of the token there; zeros if there are none."""
    seen = slice(max(0, end - (rules.window or end)), end)
    keys, values, q = (np.asarray(x, np.float64) for x in (k_skh[seen], v_skh[seen], q_kqh))
    if not end:
        return np.zeros_like(q)
    scores = np.einsum("kqh,skh->kqs", q, keys) * rules.scale_of(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kqs,skh->kqh", weights / weights.sum(-1, keepdims=True), values)


def _int8_paged(*, lengths: list[int], heads: int, width: int, page: int = 8) -> Pairs:
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
    before, pool = int8_attention(first, pool, interpret=True)
    new = [x[np.arange(rows), last][:, None] for x in (q, k, v)]
    after, _ = int8_attention(PagedRows(new[0], new[1], new[2], table, lasts, counts), pool, interpret=True)
    k, v = (restore(*round_heads(x), jnp.float32) for x in (k, v))
    pairs = []
    for row, end in enumerate(lengths):
        parts = [(before[row, at], at + 1, at) for at in range(last[row])] + [(after[row, 0], end, last[row])]
        pairs += [(found, _attention(q[row, at], k[row], v[row], seen, PLAIN)) for found, seen, at in parts]
    return pairs


def _head(*, words: int, kernel: bool, width: int = 16, tokens: int = 10, soft_cap: float | None = None) -> Pairs:
    """Log-probabilities and entropies, and the gradients of a random mixture of them."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((tokens, width)), 0.3 * rng.standard_normal((width, words))
    targets, mixed = rng.integers(0, words, tokens).astype(np.int32), rng.standard_normal((2, tokens))
    rules = HeadRules(temperature=0.8, soft_cap=soft_cap, tile=2048 if words > 9999 else 128, tokens=8)

    def ours(x: Any, weight: Any) -> Any:
        found = policy_statistics(x, weight, jnp.asarray(targets), rules, kernel=kernel, interpret=kernel)
        return jnp.sum(mixed[0] * found.logprob) + jnp.sum(mixed[1] * found.entropy), found[:3:2]

    def plain(x: Any, weight: Any) -> Any:
        logprobs = jax.nn.log_softmax(rules.logits(x @ weight), axis=-1)
        chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.sum(mixed[0] * chosen) + jnp.sum(mixed[1] * entropy), (chosen, entropy)

    def results(fn: Callable[..., Any], dtype: Any) -> Any:
        (_, found), gradients = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)(
            jnp.asarray(x, dtype), jnp.asarray(weight, dtype)
        )
        return jax.tree.map(np.asarray, (*found, *gradients))

    found = results(ours, jnp.float32)
    with jax.enable_x64(True):
        right = results(plain, jnp.float64)
    return list(zip(found, right, strict=True))


def _low_rank_ffn(*, tokens: int, units: int, ranks: tuple[int, int, int], width: int = 32) -> Pairs:
    """A gated network whose matrices are factors of these ranks."""
    rng = np.random.default_rng(0)
    gate, up, down = ranks
    shapes = [(width, gate), (gate, units), (width, up), (up, units), (units, down), (down, width)]
    x, factors = (
        rng.standard_normal((tokens, width)),
        GLUFactors(*(rng.standard_normal(s) / s[0] ** 0.5 for s in shapes)),
    )
    found = by_kernel(
        jnp.asarray(x, jnp.float32),
        GLUFactors(*(jnp.asarray(one, jnp.float32) for one in factors)),
        lambda gate, up: jax.nn.silu(gate) * up,
        interpret=True,
    )
    wide, other = x @ factors.gate_a @ factors.gate_b, x @ factors.up_a @ factors.up_b
    return [(found, wide / (1 + np.exp(-wide)) * other @ factors.down_a @ factors.down_b)]


CASES: Mapping[str, Callable[[], Pairs]] = MappingProxyType(
    {
        "paged attention: one kv head, an idle row, a row of one token": lambda: _paged(
            lengths=[17, 0, 1], heads=1, width=128
        ),
        "paged attention: heads of 64, a full table": lambda: _paged(lengths=[24, 24], heads=2, width=64),
        "paged attention: heads of 80": lambda: _paged(lengths=[9, 20], heads=2, width=80),
        "paged attention: a window shorter than a page": lambda: _paged(
            lengths=[9, 20], heads=2, width=128, rules=ScoreRules(window=3)
        ),
        "paged attention in fixed blocks: one kv head, an idle row, a row of one token": lambda: _paged(
            lengths=[17, 0, 1], heads=1, width=128, page=64, exact=True
        ),
        "paged attention in fixed blocks: heads of 80, a window": lambda: _paged(
            lengths=[9, 20], heads=2, width=80, page=64, rules=ScoreRules(window=3), exact=True
        ),
        "product in fixed order: one row, blocks that are not full": lambda: _exact_product(
            rows=1, depth=600, columns=1100
        ),
        "product in fixed order: rows of two tiles": lambda: _exact_product(rows=130, depth=96, columns=24),
        "cascade attention: one kv head, an idle row": lambda: _paged(
            lengths=[17, 0, 20], heads=1, width=128, shared=16
        ),
        "cascade attention: heads of 64, all but one key shared": lambda: _paged(
            lengths=[17, 17], heads=2, width=64, shared=16
        ),
        "cascade attention: heads of 80": lambda: _paged(lengths=[19, 24], heads=2, width=80, shared=8),
        "int8 paged attention: two kv heads, an idle row, a row of one token": lambda: _int8_paged(
            lengths=[17, 0, 1], heads=2, width=128
        ),
        "int8 paged attention: heads of 80, a full table": lambda: _int8_paged(lengths=[24, 24], heads=4, width=80),
        "low-rank feed-forward: three ranks, a block that is not full, five tiles": lambda: _low_rank_ffn(
            tokens=520, units=640, ranks=(24, 40, 16)
        ),
        "policy head: tiles and blocks not full, soft cap": lambda: _head(words=300, kernel=True, soft_cap=5.0),
        "policy head: 151,936 words": lambda: _head(words=151_936, kernel=True, tokens=8, width=8),
        "policy head by XLA: 151,936 words": lambda: _head(words=151_936, kernel=False, tokens=8, width=8),
    }
)
