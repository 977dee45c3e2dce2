"""Queries, keys and values of a decoding step by one product, normed and rotated together, on CPUs.

There a step is some hundred small operations. Each product and each sum is a call of a library, of about 2 us besides
its work, and loops over half a head are unrolled and not computed in vectors. So a step of many rows multiplies with
the three matrices side by side, and norms and rotates queries and keys as one row of numbers each. Every number is
computed as `Attention` computes it alone, to the bit. XLA puts the matrices together before the loop over steps, so a
dispatch holds a second copy of them; those of int8 become floats, and are put together, in each step.

Shape letters: n query and key heads; others as in grouped_query.py.
"""

from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.deterministic import no_fuse, sum_of_squares
from axlearn_like.kernels.exact.scope import exact_kernels
from axlearn_like.kernels.quantised_matmul import product_numbers
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.linear import ROWS_OF_ONE_ORDER, project
from axlearn_like.layers.norm import OffsetRMSNorm, RMSNorm
from mesh.devices import platform

_COLUMNS = 64  # XLA's CPU matmul sums columns that are not a multiple of these in another order
_NORMS = RMSNorm, OffsetRMSNorm


def joins_heads(layer: Any, x_btd: jax.Array, context: Any) -> bool:
    """Return True if `joined_heads` is for this step of an `Attention` layer.

    It is for steps of one token of many rows, on one CPU in float32, with plain matrices and the usual rotation.
    """
    rows, length, _ = x_btd.shape
    if not (getattr(context, "decodes", False) and length == 1 and rows >= ROWS_OF_ONE_ORDER):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if platform() != "cpu" or not (mesh.empty or mesh.size == 1) or x_btd.dtype != jnp.float32:
        return False
    if exact_kernels() is not None or product_numbers() is not None or type(layer.rope) is not Rope:
        return False
    kv_heads, _, width = layer.query_shape
    if kv_heads * width % _COLUMNS:
        return False
    norms = [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
    alike = len(norms) != 1 and all(type(norm) in _NORMS and norm.eps == norms[0].eps for norm in norms)
    return alike and all(isinstance(matrix, jax.Array) for matrix in _matrices(layer))


def joined_heads(layer: Any, x_btd: jax.Array, positions_bt: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rotated queries [b, t, k, q, h] and keys, and values, both [b, t, k, h], of one token a row."""
    (rows, length, dim), (kv_heads, per_kv, width) = x_btd.shape, layer.query_shape
    matrix = jnp.concatenate([jnp.reshape(matrix, (dim, -1)) for matrix in _matrices(layer)], axis=1)
    y = project(x_btd, matrix)
    biases = layer.q_bias_kqh, layer.k_bias_kh, layer.v_bias_kh
    if found := [bias[...].reshape(-1) for bias in biases if bias is not None]:
        y = y + jnp.concatenate(found)
    queries = kv_heads * per_kv
    heads = queries + kv_heads  # n
    flat = jnp.reshape(y, (rows, -1))[:, : heads * width]
    if layer.q_norm is not None and layer.k_norm is not None:
        factors = [jnp.tile(layer.q_norm.factor, queries), jnp.tile(layer.k_norm.factor, kv_heads)]
        flat = _normed(y, flat, jnp.concatenate(factors), width, layer.q_norm.eps)
    rotated = jnp.reshape(_rotated(layer.rope, no_fuse(flat), positions_bt, heads), (rows, length, heads, width))
    values = jnp.reshape(y[..., heads * width :], (rows, length, kv_heads, width))
    return jnp.reshape(rotated[:, :, :queries], (rows, length, *layer.query_shape)), rotated[:, :, queries:], values


def _matrices(layer: Any) -> tuple[Any, Any, Any]:
    return layer.q_dkqh[...], layer.k_dkh[...], layer.v_dkh[...]


def _normed(y: jax.Array, flat: jax.Array, factors: jax.Array, width: int, eps: float) -> jax.Array:
    """Return queries and keys [b, n * h] as the norms of their heads, of this width, make them."""
    rows, heads = y.shape[0], flat.shape[1] // width
    # Squares of values are summed too, since leaving them out would copy the rest.
    squares = sum_of_squares(jnp.reshape(y, (rows, 1, -1, width)))[:, :, :heads]
    scale = 1.0 / no_fuse(jnp.sqrt(squares / width + eps))
    scale = no_fuse(jnp.reshape(jnp.broadcast_to(scale, (rows, 1, heads, width)), flat.shape))
    return flat * scale * factors


def _rotated(rope: Rope, flat: jax.Array, positions_bt: jax.Array, heads: int) -> jax.Array:
    """Return heads side by side, [b, n * h], at their positions: x cos, and (-sin, sin) times x, halves exchanged."""
    rows, half = flat.shape[0], flat.shape[1] // heads // 2
    cos, sin = (jnp.reshape(part, (rows, half)) for part in rope(positions_bt))
    cos, sin = (no_fuse(jnp.tile(jnp.concatenate(parts, axis=-1), (1, heads))) for parts in ((cos, cos), (-sin, sin)))
    halves = jnp.reshape(flat, (rows, heads, 2, half))
    # Copies of their own: fused with the products, they would be computed number by number.
    exchanged = no_fuse(jnp.stack([halves[:, :, 1], halves[:, :, 0]]))
    exchanged = no_fuse(jnp.reshape(jnp.moveaxis(exchanged, 0, -2), flat.shape))
    return no_fuse(flat * cos + exchanged * sin)
