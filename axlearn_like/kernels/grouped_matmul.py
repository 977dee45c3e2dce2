"""Grouped matrix products: rows sorted by group, each times its group's matrix. The core of a mixture of experts.

By `jax.lax.ragged_dot`, which XLA compiles to its own kernels on TPUs and GPUs; in blocks of rows on CPUs.
"""

from typing import Any

import jax

from axlearn_like.kernels import blocked_matmul
from axlearn_like.kernels.quantised_matmul import dequantise, has_columns, keep_in_loop


@jax.custom_vjp
def grouped_product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return x [rows, in] times w [groups, in, out]: [rows, out] of the type of x.

    The first sizes[0] rows belong to group 0, the next sizes[1] to group 1 and so on, int32 [groups]. Rows beyond the
    sum of the sizes have an undefined result. Inside a shard_map all three vary over the same axes. The gradient is
    explicit because that of a platform choice would store the residuals of every branch.
    """
    return jax.lax.platform_dependent(x, w, sizes, cpu=blocked_matmul.forward, default=jax.lax.ragged_dot)


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

    dx, dw = jax.lax.platform_dependent(*kept, dy, cpu=blocked_matmul.backward, default=by_xla)
    return dx, dw, None


grouped_product.defvjp(_forward, _backward)
