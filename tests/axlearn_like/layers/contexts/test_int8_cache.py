"""Rounded keys and values: how far they are from what was written, and what of attention follows from that."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.int8_heads import restore, round_heads
from axlearn_like.layers.contexts.int8_cache import make_int8_pool
from axlearn_like.layers.contexts.paged import PagedContext

PAGE, PAGES, HEADS, WIDTH = 16, 9, 2, 32


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-20, 20), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_an_entry_moves_by_at_most_a_254th_of_the_largest(seed: int, exponent: int, dtype: str):
    x = jnp.asarray(np.random.default_rng(seed).standard_t(2, (3, 5, WIDTH)) * 2.0**exponent, dtype)
    numbers, scales = round_heads(x)
    assert numbers.dtype == jnp.int8 and scales.shape == (3, 5, 1)
    exact = np.asarray(x, np.float64)
    largest = np.abs(exact).max(-1, keepdims=True)
    moved = np.abs(np.asarray(restore(numbers, scales, "float32"), np.float64) - exact)
    assert (moved <= largest / 254 * (1 + 1e-4)).all()
    assert (np.abs(np.asarray(numbers)).max(-1) == 127).all()


def test_zeros_stay_zeros_and_what_is_not_a_number_is_none_afterwards():
    x = jnp.zeros((3, WIDTH)).at[1, 0].set(jnp.nan).at[2, 0].set(jnp.inf)
    found = np.asarray(restore(*round_heads(x), "float32"))
    assert not found[0].any() and np.isnan(found[1]).all() and not np.isfinite(found[2]).any()


def rows(seed: int, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, chunk, HEADS, 3, WIDTH))
    k, v = rng.normal(size=(2, 2, chunk, HEADS, WIDTH))
    return tuple(x.astype(np.float32) for x in (q, k, v))  # pyright: ignore


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("rckqh,rskh->rkqcs", q, k) / np.sqrt(WIDTH)
    scores[..., ~np.tri(q.shape[1], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("rkqcs,rskh->rckqh", weights / weights.sum(-1, keepdims=True), v)


@jax.jit
def attend(q: Any, k: Any, v: Any, pool: Any, table: Any, starts: Any, counts: Any) -> tuple[jax.Array, Any]:
    context = PagedContext(table, starts, counts, chunk=q.shape[1], pages=PAGES)
    unused: Any = None
    mixed, (pool, _) = context.attend(q, k, v, (pool, jnp.int32(0)), AttentionParams(ScoreRules(), unused, unused))
    return mixed, pool


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(
    "parts", [[16, 16, 5], *(pytest.param(parts, marks=pytest.mark.full) for parts in ([37], [1] * 37))]
)
def test_attention_is_that_to_rounded_keys_and_values_and_near_the_exact_one(parts: list[int]):
    """The former to 3e-6, the latter to what rounding can do: see `bound`."""
    q, k, v = rows(0, sum(parts))
    pool = make_int8_pool(layers=1, pages=PAGES, page_size=PAGE, kv_heads=HEADS, head_dim=WIDTH)
    pool = jax.tree.map(lambda x: x + x.dtype.type(5), pool)  # of earlier owners of the pages
    table = np.array([[3, 1, 7, 5], [2, 8, 4, 6]], np.int32)
    found, start = [], 0
    for count in parts:
        new = (x[:, start : start + count] for x in (q, k, v))
        mixed, pool = attend(*new, pool, table, np.full(2, start, np.int32), np.full(2, count, np.int32))
        found.append(np.asarray(mixed))
        start += count
    found = np.concatenate(found, axis=1)
    held = [np.asarray(restore(*round_heads(jnp.asarray(x)), "float32")) for x in (k, v)]
    np.testing.assert_allclose(found, exact(q, *held), rtol=1e-6, atol=3e-6)
    assert (np.abs(found - exact(q, k, v)) <= bound(q, k, v)).all()


def bound(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """The most that rounding can move an entry of the result.

    A score moves by at most d = |q|_1 max|k| / 254 / sqrt(h), so a weight by a factor of at most e^(2d); a value by
    max|v| / 254.
    """
    moved = np.abs(q).sum(-1).max() * np.abs(k).max() / 254 / np.sqrt(WIDTH)
    return float((np.exp(2 * moved) - 1) * np.abs(v).max() + np.abs(v).max() / 254)
