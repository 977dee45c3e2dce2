"""Attention in fixed blocks: one kernel for tokens, chunks and whole rows, and the same bits from all (simulated)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.exact.attention import PAGE, exact_paged_attention, exact_row_attention
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.rows import PagedRows
from mesh import UserError
from tests.axlearn_like.kernels.mosaic import mosaic_texts, steps_of, without_batch

HEADS, PER_HEAD, WIDTH = 2, 2, 64


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def described(count: int, chunk: int, pages: int = 128) -> Any:
    integers: list[Any] = [array(*shape, dtype=jnp.int32) for shape in ((count, pages), (count,), (count,))]
    q: Any = array(count, chunk, 8, 4, 128)
    heads: Any = array(count, chunk, 8, 128)
    return PagedRows(q, heads, heads, *integers)


@pytest.mark.slow
def test_one_kernel_serves_tokens_chunks_and_whole_rows():
    rules, pool = ScoreRules(), array(1001, PAGE, 16, 128)
    paged = partial(exact_paged_attention, rules=rules)
    token, chunk = (mosaic_texts(paged, described(*shape), pool)[-1] for shape in ((64, 1), (4, 128)))
    whole = array(4, 2048, 8, 4, 128), array(4, 2048, 8, 128), array(4, 2048, 8, 128)
    (row,) = mosaic_texts(partial(exact_row_attention, rules=rules), *whole)
    assert [steps_of(text) for text in (token, chunk, row)] == [[64], [64], [1024]]
    assert len({without_batch(text) for text in (token, chunk, row)}) == 1


def test_sinks_and_whole_attention_are_refused():
    q, k = jnp.zeros((1, 1, 1, 1, 8)), jnp.zeros((1, 1, 1, 8))
    with pytest.raises(UserError, match="does not support sinks"):
        exact_row_attention(q, k, k, rules=ScoreRules(), sinks=True)
    with pytest.raises(UserError, match="expected causal attention"):
        exact_row_attention(q, k, k, rules=ScoreRules(causal=False))


@pytest.mark.numerics
@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rules", [ScoreRules(), ScoreRules(window=7, soft_cap=5.0)])
def test_tokens_and_chunks_have_the_bits_of_whole_rows_and_the_values_of_float64(dtype: Any, rules: ScoreRules):
    rng, count, length = np.random.default_rng(0), 2, 21
    q, k, v = (
        jnp.asarray(rng.standard_normal((count, length, HEADS, *more, WIDTH), np.float32), dtype)
        for more in ((PER_HEAD,), (), ())
    )
    whole = exact_row_attention(q, k, v, rules=rules, interpret=True)
    right = attention(q, k, v, rules)
    bound = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(np.asarray(whole, np.float64), right, atol=bound * np.abs(right).max())
    run = jax.jit(partial(exact_paged_attention, rules=rules, interpret=True))
    table, at = jnp.asarray([[2], [1]], jnp.int32), 0
    pool = make_pool(1, 3, PAGE, HEADS, WIDTH, dtype)
    for chunk in (19, 1, 1):
        some = slice(at, at + chunk)
        numbers = jnp.full(count, at, jnp.int32), jnp.full(count, chunk, jnp.int32)
        mixed, pool = run(PagedRows(q[:, some], k[:, some], v[:, some], table, *numbers), pool)
        np.testing.assert_array_equal(np.asarray(mixed, np.float32), np.asarray(whole[:, some], np.float32))
        at += chunk


def attention(q: Any, k: Any, v: Any, rules: ScoreRules) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("btkqh,bskh->bkqts", q, k) * rules.scale_of(WIDTH)
    if rules.soft_cap is not None:
        scores = rules.soft_cap * np.tanh(scores / rules.soft_cap)
    at = np.arange(q.shape[1])
    seen = (at <= at[:, None]) & (at > at[:, None] - (rules.window or len(at)))
    weights = np.exp(np.where(seen, scores, -np.inf))
    return np.einsum("bkqts,bskh->btkqh", weights / weights.sum(-1, keepdims=True), v)
