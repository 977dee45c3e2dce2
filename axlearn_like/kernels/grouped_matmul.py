"""Grouped matrix products: rows sorted by group, each times its group's matrix. The core of a mixture of experts.

By `jax.lax.ragged_dot`, which XLA compiles to its own kernels on TPUs and GPUs; in blocks of rows on CPUs.

XLA's CPU backend has no grouped matmul: it multiplies all rows with all matrices and adds zeros. Here the rows of each
group are padded to whole blocks, so at most one block per group is wasted, and a row's result is the same to the bit
however many other rows there are (`axlearn_like.layers.linear` says from how many rows on that holds).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.kernels.quantised_matmul import dequantise, has_columns, keep_in_loop
from mesh.sharding import vary, varying


@jax.custom_vjp
def grouped_product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return x [rows, in] times w [groups, in, out]: [rows, out] of the type of x.

    The first sizes[0] rows belong to group 0, the next sizes[1] to group 1 and so on, int32 [groups]. Rows beyond the
    sum of the sizes have an undefined result. Inside a shard_map all three vary over the same axes. The gradient is
    explicit because that of a platform choice would store the residuals of every branch.
    """
    return jax.lax.platform_dependent(x, w, sizes, cpu=block_products, default=jax.lax.ragged_dot)


def product_in_stack(x: jax.Array, stack: Any, layer: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the product with the matrices of a layer of [layers, groups, in, out], without a gradient.

    These are of the type of x, or numbers of int8 with a scale for each column (`has_columns`). TPUs read them in the
    stack, by a kernel (stacked_grouped_matmul.py); elsewhere they are cut out of it.
    """
    from axlearn_like.kernels.stacked_grouped_matmul import stacked_product  # Pallas: slow to import

    def cut(x: jax.Array, stack: Any, layer: jax.Array, sizes: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), stack)
        if has_columns(w):
            x, w = keep_in_loop(x, w)
            w = dequantise(w, x.dtype)
        return grouped_product(x, w, sizes)

    return jax.lax.platform_dependent(x, stack, layer, sizes, tpu=stacked_product, default=cut)


def _forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return grouped_product(x, w, sizes), (x, w, sizes)


def _backward(kept: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    def by_xla(x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)[1](dy)

    dx, dw = jax.lax.platform_dependent(*kept, dy, cpu=block_gradients, default=by_xla)
    return dx, dw, None


grouped_product.defvjp(_forward, _backward)


class Blocks(NamedTuple):
    """The blocks that hold sorted rows."""

    group: jax.Array  # int32 [blocks], the group whose matrix multiplies the block
    row: jax.Array  # int32 [blocks, rows of a block], the row at each slot
    filled: jax.Array  # bool [blocks, rows of a block], False where a slot has no row
    place: jax.Array  # int32 [rows], the slot of each row, in the flattened blocks
    used: jax.Array  # int32 [], blocks with rows in them; the others come last


def in_blocks(sizes: jax.Array, rows: int, block: int) -> Blocks:
    """Return the blocks of `rows` rows: the first sizes[0] belong to group 0 and so on; sum(sizes) may be less."""
    groups = sizes.shape[0]
    count = -(-rows // block) + min(groups, rows)
    ends, blocks = jnp.cumsum(sizes), -(-sizes // block)
    block_ends = jnp.cumsum(blocks)
    index = jnp.arange(count)
    group = jnp.minimum(jnp.searchsorted(block_ends, index, side="right"), groups - 1).astype(jnp.int32)
    starts, block_starts = ends - sizes, block_ends - blocks
    row = (starts[group] + (index - block_starts[group]) * block)[:, None] + jnp.arange(block)
    filled = (row < ends[group][:, None]) & (index < block_ends[-1])[:, None]
    each = jnp.arange(rows)
    mine = jnp.minimum(jnp.searchsorted(ends, each, side="right"), groups - 1)
    place = jnp.where(each < ends[-1], block_starts[mine] * block + each - starts[mine], 0)
    return Blocks(group, jnp.where(filled, row, 0), filled, place, block_ends[-1])


def block_products(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return rows [rows, in] times their group's matrix [groups, in, out]; rows beyond the groups become zeros."""
    b = in_blocks(sizes, x.shape[0], _block(w.shape[2]))
    return _out_of_blocks(_products(_into_blocks(x, b), w, b, transposed=False), b, sizes)


def block_gradients(x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of rows and matrices."""
    b = in_blocks(sizes, x.shape[0], _block(min(w.shape[1:])))
    x_blocks, dy_blocks = _into_blocks(x, b), _into_blocks(dy, b)
    dx = _out_of_blocks(_products(dy_blocks, w, b, transposed=True), b, sizes)

    def add(i: jax.Array, dw: jax.Array) -> jax.Array:
        mine = jnp.dot(x_blocks[i].T, dy_blocks[i], preferred_element_type=jnp.float32)
        old = jax.lax.dynamic_index_in_dim(dw, b.group[i], keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw, old + mine, b.group[i], 0)

    dw = jax.lax.fori_loop(0, b.used, add, vary(jnp.zeros(w.shape, jnp.float32), varying(w)))
    return dx, dw.astype(w.dtype)


def _products(x_blocks: jax.Array, w: jax.Array, b: Blocks, *, transposed: bool) -> jax.Array:
    width = w.shape[1] if transposed else w.shape[2]

    def put(i: jax.Array, out: jax.Array) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(w, b.group[i], keepdims=False)
        y = jnp.dot(x_blocks[i], matrix.T if transposed else matrix)
        return jax.lax.dynamic_update_index_in_dim(out, y, i, 0)

    # One turn for each block in use, a number known only at run time.
    out = jnp.zeros((*x_blocks.shape[:2], width), x_blocks.dtype)
    return jax.lax.fori_loop(0, b.used, put, vary(out, varying(x_blocks)))


def _block(narrowest: int) -> int:
    return 128 if narrowest < 16 else 64  # see `axlearn_like.layers.linear`


def _into_blocks(x: jax.Array, b: Blocks) -> jax.Array:
    return jnp.where(b.filled[..., None], x[b.row], 0)


def _out_of_blocks(y_blocks: jax.Array, b: Blocks, sizes: jax.Array) -> jax.Array:
    y = y_blocks.reshape(-1, y_blocks.shape[-1])[b.place]
    return jnp.where((jnp.arange(len(y)) < jnp.sum(sizes))[:, None], y, 0)
