"""Keys and values of eight bits in the pages of a cache: int8 numbers and a float32 scale for each token and head.

A token's keys of one head are rounded when they are written, and so are its values (kernels/int8_heads.py). All
queries, those of the token's own step included, see what the pages hold. Hence a token's keys are the same in whichever
chunk, batch or dispatch they were made, and after a page was copied, shared or computed again. One scale for all tokens
of a page would break that: a token with larger entries would round again, coarser, what stands in the page, so results
would depend on what was written with what, and a page that sequences share could not be appended to.

Shape letters: r rows, c tokens of a row's chunk, k heads, h their width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axlearn_like.kernels.int8_heads import Rounded, restore, round_heads
from mesh.rules import constrain

TAG = "int8-kv"  # tag of rollouts over such a cache
Pool = Any  # dict of int8 arrays k, v (see `paged.make_pool`), and of their float32 scales k_scales, v_scales


def as_held(x: jax.Array, held: jax.Array | Rounded) -> jax.Array | Rounded:
    """Return new keys or values in the form of those that are held: rounded, or as they are."""
    return round_heads(x) if isinstance(held, Rounded) else x


def as_read(x: jax.Array | Rounded, dtype: DTypeLike) -> jax.Array:
    """Return keys or values as attention reads them."""
    return restore(*x, dtype) if isinstance(x, Rounded) else x


def make_int8_pool(*, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int) -> Pool:
    """Return an empty pool: k [layers * pages, k, h, page_size], v [layers * pages, k, page_size, h], and scales.

    Scales have the axes of their numbers, that of the width with size 1.
    """

    def empty(dtype: DTypeLike, *shape: int) -> jax.Array:
        return constrain(jnp.zeros((layers * pages, kv_heads, *shape), dtype), None, "heads", None, None)

    return {
        "k": empty(jnp.int8, head_dim, page_size),
        "v": empty(jnp.int8, page_size, head_dim),
        "k_scales": empty(jnp.float32, 1, page_size),
        "v_scales": empty(jnp.float32, page_size, 1),
    }


def is_int8(pool: Any) -> bool:
    """Return True if the pages hold such numbers."""
    return isinstance(pool, dict) and "k_scales" in pool


def empty_tokens(pool: Pool, *axes: int) -> jax.Array | Rounded:
    """Return zeros, [*axes, k, h], in the form of the pool: room for keys or values of tokens."""
    _, heads, _, width = pool["v"].shape

    def empty(dtype: DTypeLike, width: int) -> jax.Array:
        return constrain(jnp.zeros((*axes, heads, width), dtype), *[None] * len(axes), "heads", None)

    if is_int8(pool):
        return Rounded(empty(jnp.int8, width), empty(jnp.float32, 1))
    return empty(pool["v"].dtype, width)


def write_rounded(pool: Pool, k_rckh: Rounded, v_rckh: Rounded, page: jax.Array, slot: jax.Array) -> Pool:
    """Return the pool with keys and values at these pages and slots, int32 [r, c]; in place where it is donated."""
    k, v = (jax.tree.map(lambda leaf: constrain(leaf, None, None, "heads", None), x) for x in (k_rckh, v_rckh))
    return {
        "k": pool["k"].at[page, :, :, slot].set(k.numbers),
        "v": pool["v"].at[page, :, slot].set(v.numbers),
        "k_scales": pool["k_scales"].at[page, :, :, slot].set(k.scales),
        "v_scales": pool["v_scales"].at[page, :, slot].set(v.scales),
    }


def read_pages(pool: Pool, table: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return the keys [r, w, k, h, page_size] and values [r, w, k, page_size, h] of the pages of a table [r, w]."""
    if not is_int8(pool):
        return pool["k"][table], pool["v"][table]
    k = restore(pool["k"][table], pool["k_scales"][table], dtype)
    return k, restore(pool["v"][table], pool["v_scales"][table], dtype)
