"""The self-test of paged attention (paged_attention/self_test.py) for the kernel over a cache in rank space."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.low_rank.factors import KeySteps, KeyValueFactors, chunks_of
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.rows import LANES, PagedRows, RankRows
from axlearn_like.kernels.paged_attention.self_test import (
    KernelShapes,
    SelfTestBatch,
    plain_attention,
    random_values,
    run_self_test,
)
from mesh.rules import constrain, use_rules

_SPREAD = 2.0  # spread of scores; only the kernel rounds keys to the pool's type


def run_rank_self_test(
    kernel: PagedKernel, shapes: KernelShapes, ranks: tuple[int, int], kinds: Sequence[tuple[ScoreRules, KeySteps]]
) -> dict[str, Any]:
    """Compare the kernel with XLA for each kind of layer; returns fields of an event.

    Args:
        ranks: ranks of keys and of values.
        kinds: rules of a kind of layer, and what it does to keys.

    Raises:
        KernelDisagrees: see `run_self_test`.
    """
    found = [
        run_self_test(kernel, shapes, [rules], functools.partial(_compare, ranks, steps))
        for rules, steps in dict.fromkeys(kinds)
    ]
    return found[0] | {name: max(one[name] for one in found) for name in ("worst", "seconds")}


def _compare(
    ranks: tuple[int, int],
    steps: KeySteps,
    kernel: PagedKernel,
    shapes: KernelShapes,
    batch: SelfTestBatch,
    rules: ScoreRules,
) -> tuple[float, int]:
    rng, (heads, per_head, width), dtype = np.random.default_rng(0), shapes.heads, shapes.dtype
    values = functools.partial(random_values, rng, dtype=dtype)
    count, page, ends = len(batch.starts), shapes.page_size, batch.starts + batch.counts
    pages = -(-int(ends.max()) // page)
    low = [values((count, pages * page, rank)) for rank in ranks]
    table = (1 + rng.permutation(count * pages).reshape(count, pages)).astype(np.int32)
    table[np.arange(pages) * page >= ends[:, None]] = 0  # unused page, read and ignored
    bias = [values((heads, width)) if steps.biased else None for _ in ranks]
    matrices = [values((rank, heads, width), factor=rank**-0.5) for rank in ranks]
    norm = None if steps.eps is None else values((width,))
    made: Any = *matrices, *bias, norm, steps
    factors = KeyValueFactors(*made)
    before = values((1 + count * pages, page, 2 * chunks_of(max(ranks)), LANES))
    after = before.copy()
    for row, (start, end) in enumerate(zip(batch.starts, ends, strict=True)):
        for pool, length in ((before, start), (after, end)):
            _write(pool, [x[row, :length] for x in low], table[row])
    q = values((count, batch.chunk, heads, per_head, width), factor=_SPREAD / (rules.scale_of(width) * width**0.5))
    places = np.minimum(batch.starts[:, None] + np.arange(batch.chunk), pages * page - 1)[..., None]
    new = [np.take_along_axis(x, places, axis=1) for x in low]
    arrays: Any = q, *new, table, batch.starts, batch.counts
    rows = RankRows(*arrays)

    def measure(rows: RankRows, low: Any, factors: KeyValueFactors, before: Any, after: Any) -> Any:
        mixed, pool = kernel.attend_rank_space(rows, before, factors, rules=rules, sinks=False)
        mixed, pool = (constrain(x, *(None,) * x.ndim) for x in (mixed.astype(jnp.float32), pool))
        k, v = _expanded(low, factors)
        paged = PagedRows(rows.q_rckqh, k, v, *rows[3:])
        right = plain_attention(paged, k, v, rules)
        return jnp.max(jnp.abs(mixed - right)) / jnp.max(jnp.abs(right)), jnp.sum(pool != after)

    with use_rules({"batch": ()}):  # every device has all rows
        difference, wrong = jax.jit(measure)(rows, low, factors, before, after)
    return float(difference), int(wrong)


def _expanded(low: Any, factors: KeyValueFactors) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of whole rows by XLA, float32 [r, s, k, h]."""
    steps, exact = factors.steps, jax.lax.Precision.HIGHEST
    arrays: Any = jax.tree.map(lambda x: x.astype(jnp.float32), (low, factors))
    (low_k, low_v), held = arrays
    k, v = (jnp.einsum("rsl,lkh->rskh", x, b, precision=exact) for x, b in ((low_k, held.k_lkh), (low_v, held.v_lkh)))
    k, v = k if held.k_bias_kh is None else k + held.k_bias_kh, v if held.v_bias_kh is None else v + held.v_bias_kh
    if steps.eps is not None:
        k = k * jax.lax.rsqrt(jnp.mean(k * k, axis=-1, keepdims=True) + steps.eps) * held.k_norm_h
    if not steps.freq:
        return k, v
    angles = jnp.arange(k.shape[1], dtype=jnp.float32)[:, None, None] * jnp.asarray(steps.freq, jnp.float32)
    cos, sin = steps.factor * jnp.cos(angles), steps.factor * jnp.sin(angles)
    first, second = jnp.split(k, 2, axis=-1)  # rotated by halves
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), v


def _write(pool: np.ndarray, low: list[np.ndarray], pages: np.ndarray) -> None:
    """Write tokens from position 0 on into their pages; what pads a rank is zero."""
    places, page_size, lines = np.arange(len(low[0])), pool.shape[1], pool.shape[2]
    page, slot = pages[places // page_size], places % page_size
    for first, x in enumerate(low):
        wide = np.pad(x, [(0, 0), (0, lines // 2 * LANES - x.shape[1])])
        pool[page, slot, first::2] = wide.reshape(len(x), lines // 2, LANES)
