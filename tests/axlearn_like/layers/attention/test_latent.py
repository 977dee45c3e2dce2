"""Latent attention against numpy in float64, and through every context."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.cells import fill, make_window
from axlearn_like.layers.contexts.latents import make_latent_pool
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.contexts.paged import PagedContext, RowContext, make_pool
from axlearn_like.layers.contexts.window import Cache, WindowContext
from axlearn_like.layers.norm import RMSNorm
from mesh import UserError, make_mesh
from tests.axlearn_like.layers import reference
from tests.axlearn_like.layers.small import initialise
from tests.bounds import within

pytestmark = pytest.mark.numerics

DIM, LENGTH, NOPE, ROPE, VALUE, RANK = 20, 9, 6, 4, 8, 5
POSITIONS = np.array([0, 1, 2, 3, 4, 0, 1, 2, 0], np.int32)
SEGMENTS = np.array([1, 1, 1, 1, 1, 2, 2, 2, 0], np.int32)


def config(**changes: Any) -> LatentAttention.Config:
    cfg = LatentAttention.Config(
        dim=DIM, num_heads=3, kv_rank=RANK, nope_dim=NOPE, rope_dim=ROPE, value_dim=VALUE,
        norm=RMSNorm.Config(eps=0.1), rope=Rope.Config(theta=100.0),
    )  # fmt: skip
    return cfg.set(**changes)


def expected(p: dict[str, Any], x: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """One row by the equations of DeepSeek-V2, 2.1.2 and 2.1.3, head by head."""
    freq, eps = reference.frequencies(ROPE, 100.0), 0.1
    down = x @ p["kv_down_dr"]
    latent = reference.norm(down[:, :RANK], p["kv_norm"]["scale"], eps)
    shared = np.stack([reference.rotate(row, t, freq) for row, t in zip(down[:, RANK:], positions, strict=True)])
    out = np.zeros_like(x)
    for head in range(p["k_up_rkh"].shape[1]):
        if "q_dkqh" in p:
            queries = x @ p["q_dkqh"][:, head, 0]
        else:
            queries = reference.norm(x @ p["q_down_dr"], p["q_norm"]["scale"], eps) @ p["q_up_rkqh"][:, head, 0]
        keys = np.concatenate([latent @ p["k_up_rkh"][:, head], shared], axis=1)
        values = latent @ p["v_up_rkh"][:, head]
        for t in range(len(x)):
            query = np.concatenate([queries[t, :NOPE], reference.rotate(queries[t, NOPE:], positions[t], freq)])
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            weights = reference.softmax(keys[seen] @ query / np.sqrt(NOPE + ROPE))
            out[t] += weights @ values[seen] @ p["out_kqhd"][head, 0]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("q_rank", [None, 7])
def test_it_is_the_equation(q_rank):
    graphdef, params = initialise(config(q_rank=q_rank))
    x = np.random.default_rng(2).normal(size=(1, LENGTH, DIM)).astype(np.float32)
    context = PackedContext(jnp.asarray(POSITIONS[None]), jnp.asarray(SEGMENTS[None]))
    y, cache = jax.jit(lambda p, x, c: bind(graphdef, p)(x, c, None))(params, x, context)
    assert cache is None
    np.testing.assert_allclose(y[0], expected(reference.float64(params), x[0], POSITIONS, SEGMENTS), atol=2e-5)


@pytest.mark.full  # closer: test_pages_of_latents_give_what_scoring_gives
def test_scoring_and_a_paged_cache_give_the_same():
    graphdef, params = initialise(config(q_rank=7))
    layer = bind(graphdef, params)
    x = np.random.default_rng(2).normal(size=(1, 8, DIM)).astype(np.float32)
    whole = expected(reference.float64(params), x[0], np.arange(8), np.ones(8))
    scored, _ = layer(x, RowContext(jnp.arange(8)[None]), None)
    np.testing.assert_allclose(scored[0], whole, atol=2e-5)
    heads, width = layer.cache_shape
    assert (heads, width) == (3, NOPE + ROPE)
    pool, found = make_pool(layers=1, pages=3, page_size=64, kv_heads=heads, head_dim=width, dtype=jnp.float32), []
    for start, count in ((0, 5), (5, 3)):
        y, pool = prefilled(layer, x, start, count, pool)
        found.append(np.asarray(y[0]))
    np.testing.assert_allclose(np.concatenate(found), whole, atol=2e-5)


def prefilled(layer: Any, x: np.ndarray, start: int, count: int, pool: Any) -> tuple[jax.Array, Any]:
    """Outputs of tokens that are put into the second page, and the pool."""
    context = PagedContext(jnp.array([[2]]), jnp.array([start]), jnp.array([count]), chunk=count, pages=3)
    y, (pool, _) = layer(x[:, start : start + count], context, (pool, jnp.int32(0)))
    return y, pool


@functools.cache
def compiled(decode: str) -> tuple[Any, Any]:
    """Outputs of nine tokens: by scoring, from pages of latents (chunks of 5 and 3, the last one decoded); the pool."""
    graphdef, params = initialise(config(q_rank=7, decode=decode))
    x = np.random.default_rng(2).normal(size=(1, 9, DIM)).astype(np.float32)

    def run(params: Any) -> Any:
        layer = bind(graphdef, params)
        scored, _ = layer(x, RowContext(jnp.arange(9)[None]), None)
        pool = make_latent_pool(layers=1, pages=3, page_size=64, width=layer.latent_width, dtype=jnp.float32)
        pool = {"latent": pool["latent"].at[2].set(jnp.nan)}  # left by the page's previous owner
        first, pool = prefilled(layer, x, 0, 5, pool)
        second, pool = prefilled(layer, x, 5, 3, pool)
        heads, width = layer.window_shape
        windows = [make_window(1, 64, kv_heads=heads, head_dim=width, dtype=jnp.float32)]
        lengths, needed = jnp.array([8]), jnp.array([1])
        (filled,) = fill([windows], pool, [jnp.array([[2]])], lengths, needed, [layer.window_keys])
        cache = Cache(filled, jnp.zeros((1, 1, layer.latent_width)), None)
        last, cache = layer(x[:, 8:], WindowContext(lengths, needed, jnp.int32(0)), cache)
        return scored, jnp.concatenate([first, second, last], axis=1), (pool["latent"], cache.k)

    scored, cached, kept = jax.jit(run)(params)
    return (np.asarray(scored), np.asarray(cached)), kept


@pytest.mark.slow
def test_pages_of_latents_give_what_scoring_gives():
    (scored, cached), (pages, fed) = compiled("expanded")
    np.testing.assert_array_equal(cached[:, :8], scored[:, :8])  # prefill
    assert within(cached[:, 8] - scored[:, 8], 1e-6 * np.abs(scored).max())  # a row by itself: other products
    assert pages.shape == (3, 64, RANK + ROPE) and fed.shape == (1, 1, RANK + ROPE)
    assert np.all(np.isfinite(pages[2, :8])) and np.all(np.isnan(pages[2, 8:])), "one vector for each token"


@pytest.mark.slow
def test_absorbed_decoding_differs_by_rounding_alone():
    (scored, cached), _ = compiled("absorbed")
    np.testing.assert_array_equal(cached[:, :8], scored[:, :8])  # prefill is exact
    assert np.any(cached[:, 8] != scored[:, 8]) and within(cached[:, 8] - scored[:, 8], 1e-6 * np.abs(scored).max())
    mesh = make_mesh({"tensor": 3}, jax.devices()[:1] * 3).abstract_mesh
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(UserError, match='decode="absorbed" has one head of keys; expected a mesh without tensor'),
    ):
        jax.eval_shape(lambda: split(config(decode="absorbed").build(rngs=nnx.Rngs(0)))[1])


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(UserError, match="value_dim: expected nope_dim \\+ rope_dim=10 or less.* got 11"):
        initialise(config(value_dim=11))
    with pytest.raises(UserError, match="rope_dim: expected an even number, .* got 3"):
        initialise(config(rope_dim=3))
    mesh = make_mesh({"tensor": 2}, jax.devices()[:1] * 2).abstract_mesh
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(UserError, match=r"LatentAttention: num_heads=3 do not divide evenly over the mesh \(tensor 2\)"),
    ):
        split(build_abstract(config()))[1]
