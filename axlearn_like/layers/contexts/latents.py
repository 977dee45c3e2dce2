"""Pages of latents: one vector of a token for all heads, cached in place of its keys and values.

That is in multi-head latent attention the normalised latent, then the shared key with its position (DeepSeek-V3:
512 + 64 numbers, where keys and values of 128 heads are 40,960), and with factors of the projections of keys and values
the token in their rank space (low_rank/rank_space.py). Keys and values are computed from it again where they are read,
by the same product that made them in training, so every bit is the same; or, in decoding with absorbed projections, are
not computed at all.

Shape letters: r rows, c tokens of a row's chunk, s keys of a window, w width of a latent; k, h as in
attention/grouped_query.py.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.layers.contexts.packed import Context
from mesh.rules import constrain, partition

Pool = Any  # dict of the array `latent`
Window = dict[str, jax.Array]  # k [r, k, h, s], v [r, k, s, h]
# Latents [r, s, w] and their positions [r, s] -> keys, values [r, s, k, h].
Expand = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@runtime_checkable
class LatentContext(Context, Protocol):
    """A context with a cache whose pages may hold latents."""

    decodes: ClassVar[bool]  # one token of each row

    def holds_latents(self, cache: Any) -> bool:
        """Return True if they do."""
        ...

    def attend_latents(
        self, q_btkqh: jax.Array, latent_btw: jax.Array, cache: Any, attention: AttentionParams, expand: Expand
    ) -> tuple[jax.Array, Any]:
        """Return `attend` with the keys and values that `expand` makes of latents."""
        ...


def make_latent_pool(*, layers: int, pages: int, page_size: int, width: int, dtype: Any) -> Pool:
    """Return an empty pool: latent [layers * pages, page_size, w], complete on every device."""
    return {"latent": constrain(jnp.zeros((layers * pages, page_size, width), dtype), None, None, None)}


def has_latents(pool: Any) -> bool:
    """Return True if the pages hold latents."""
    return isinstance(pool, dict) and "latent" in pool


def expands_latents(layers: Any) -> bool:
    """Return True if decoding makes keys and values of the latents that a decoder, or an attention layer, caches."""
    cached = getattr(layers, "latent_width", None) is not None
    return cached and getattr(layers, "window_shape", layers.cache_shape) == layers.cache_shape


def page_size_of(pool: Pool) -> int:
    """Return the tokens of a page, of a pool of either kind."""
    return pool["latent"].shape[1] if has_latents(pool) else pool["k"].shape[-1]


def write_latents(pool: Pool, latent_rcw: jax.Array, page: jax.Array, slot: jax.Array) -> Pool:
    """Return the pool with the latents at these pages and slots, int32 [r, c]; in place where the pool is donated."""
    latent = constrain(latent_rcw.astype(pool["latent"].dtype), None, None, None)
    return {"latent": pool["latent"].at[page, slot].set(latent)}


def read_expanded(
    pool: Pool, table: jax.Array, lengths: jax.Array, expand: Expand, first: jax.Array | int = 0
) -> Window:
    """Return the keys and values of the pages of each row, side by side, as `paged.read_window` does.

    The first page begins at the position `first`, or at those of the rows, [r, 1]. Latents behind `lengths` [r], which
    the previous owner of a page left, count as zeros.
    """
    rows, pages = table.shape
    _, page_size, width = pool["latent"].shape
    latent = jnp.reshape(pool["latent"][table], (rows, pages * page_size, width), out_sharding=partition(*[None] * 3))
    places = jnp.broadcast_to(jnp.arange(pages * page_size), latent.shape[:2])
    return as_window(*expand(jnp.where((places < lengths[:, None])[..., None], latent, 0), first + places))


def as_window(k_rskh: jax.Array, v_rskh: jax.Array) -> Window:
    """Return keys and values in the order of a window: k [r, k, h, s], v [r, k, s, h]."""
    sharding = (None, "heads", None, None)
    k, v = k_rskh.transpose(0, 2, 3, 1), v_rskh.transpose(0, 2, 1, 3)
    return {"k": constrain(k, *sharding), "v": constrain(v, *sharding)}
