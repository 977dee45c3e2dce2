"""Pages of latents: what multi-head latent attention caches of a token in place of its keys and values.

A page holds, for each of `page_size` tokens of one layer, one vector for all heads: the normalised latent, then the
shared key with its position (DeepSeek-V3: 512 + 64 numbers, where keys and values of 128 heads are 40,960). Keys and
values are computed from it again where they are read, by the same product that made them in training, so every bit is
the same; or, in decoding with absorbed projections, are not computed at all.

Shape letters: r rows, c tokens of a row's chunk, s keys of a window, w width of a latent; k, h as in
attention/grouped_query.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mesh.rules import constrain, partition

Pool = Any  # dict of the array `latent`
Window = dict[str, jax.Array]  # k [r, k, h, s], v [r, k, s, h]
Expand = Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # latents [r, s, w] -> keys, values [r, s, k, h]


def make_latent_pool(*, layers: int, pages: int, page_size: int, width: int, dtype: Any) -> Pool:
    """Return an empty pool: latent [layers * pages, page_size, w], complete on every device."""
    return {"latent": constrain(jnp.zeros((layers * pages, page_size, width), dtype), None, None, None)}


def has_latents(pool: Any) -> bool:
    """Return True if the pages hold latents."""
    return isinstance(pool, dict) and "latent" in pool


def page_size_of(pool: Pool) -> int:
    """Return the tokens of a page, of a pool of either kind."""
    return pool["latent"].shape[1] if has_latents(pool) else pool["k"].shape[-1]


def write_latents(pool: Pool, latent_rcw: jax.Array, page: jax.Array, slot: jax.Array) -> Pool:
    """Return the pool with the latents at these pages and slots, int32 [r, c]; in place where the pool is donated."""
    latent = constrain(latent_rcw.astype(pool["latent"].dtype), None, None, None)
    return {"latent": pool["latent"].at[page, slot].set(latent)}


def read_expanded(pool: Pool, table: jax.Array, lengths: jax.Array, expand: Expand) -> Window:
    """Return the keys and values of the pages of each row, side by side, as `paged.read_window` does.

    Latents behind `lengths` [r], which the previous owner of a page left, count as zeros.
    """
    rows, pages = table.shape
    _, page_size, width = pool["latent"].shape
    latent = jnp.reshape(pool["latent"][table], (rows, pages * page_size, width), out_sharding=partition(*[None] * 3))
    written = jnp.arange(pages * page_size) < lengths[:, None]
    return as_window(*expand(jnp.where(written[..., None], latent, 0)))


def as_window(k_rskh: jax.Array, v_rskh: jax.Array) -> Window:
    """Return keys and values in the order of a window: k [r, k, h, s], v [r, k, s, h]."""
    sharding = (None, "heads", None, None)
    k, v = k_rskh.transpose(0, 2, 3, 1), v_rskh.transpose(0, 2, 1, 3)
    return {"k": constrain(k, *sharding), "v": constrain(v, *sharding)}
