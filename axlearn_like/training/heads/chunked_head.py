"""A language model's head on one chunk of tokens after another: logits of the whole batch never exist.

What a head makes of a token is as wide as the vocabulary: at 152,064 words in float32, 2.3 GiB for 4,096 tokens.

* `map_chunks`: any function of tokens, chunk by chunk, recomputed in the backward pass.
* `per_device_head`: the head applied to each device's own tokens, so that its gradient is summed over devices once
  instead of once per chunk.
* `fused_linear_loss`: loss and gradient of the head in one pass (the fused linear cross-entropy of Liger Kernel, Hsu et
  al. 2024, arXiv 2410.10989, 3.2). The gradient with respect to a chunk is computed as soon as its logits exist, so
  nothing is recomputed in the backward pass, and the gathered head with its whole gradient exists only between the
  forward and the backward pass of the layers. Left to itself XLA for TPUs keeps both all through the layers' backward
  pass: 2.1 GB for 128,256 words of width 4,096 in bfloat16.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axlearn_like.layers.base import bind, split
from mesh.errors import UserError
from mesh.sharding import entry_axes, full_spec, gather_over, token_axes, vary, varying


def map_chunks(fn: Callable[..., Any], chunks: int, *arrays: jax.Array) -> Any:
    """Return `fn(*parts)` of every part, stacked: a pytree of arrays [chunks, ...].

    Args:
        fn: function of parts [batch, length / chunks, ...]; computed again in the backward pass, not stored.
        chunks: divides the length.
        arrays: each [batch, length, ...]. Part i holds the tokens i, i + chunks, ...: so a length that is sharded
            stays where it is, and each device computes its share of every part.

    Raises:
        UserError: the length is not a multiple of `chunks`.
    """
    if chunks == 1:
        return jax.tree.map(lambda x: x[None], fn(*arrays))
    parts = [split_length(x, chunks) for x in arrays]
    return jax.lax.scan(lambda _, part: (None, jax.checkpoint(fn)(*part)), None, parts)[1]


def split_length(x: jax.Array, chunks: int) -> jax.Array:
    """Reshape [batch, length, ...] to [chunks, batch, length / chunks, ...], strided as in `map_chunks`."""
    batch, length = x.shape[:2]
    if length % chunks:
        raise UserError(f"loss.chunks: {length} tokens a row do not divide into {chunks} chunks")
    shape = (batch, length // chunks, chunks, *x.shape[2:])
    spec = full_spec(x)
    out = None if spec is None else PartitionSpec(spec[0], spec[1], None, *spec[2:])
    return jnp.moveaxis(jnp.reshape(x, shape, out_sharding=out), 2, 0)


def merge_length(x: jax.Array) -> jax.Array:
    """Reshape [chunks, batch, length / chunks, ...] to [batch, length, ...], the inverse of `split_length`."""
    chunks, batch, length = x.shape[:3]
    spec = full_spec(x)
    out = None if spec is None else PartitionSpec(spec[1], spec[2], *spec[3:])
    return jnp.reshape(jnp.moveaxis(x, 0, 2), (batch, length * chunks, *x.shape[3:]), out_sharding=out)


def per_device_head(output: Any, fn: Callable[..., Any], x: jax.Array, *arrays: jax.Array) -> Any:
    """Return `fn(output, x, *arrays)`, computed on every device for its own part of the tokens.

    Args:
        output: the layer that makes logits; it is gathered over the mesh axes that shard tokens.
        fn: returns a pytree of arrays [batch, length, ...].
        x: final hidden states [batch, length, dim].
        arrays: each [batch, length, ...], sharded as x is.
    """
    axes = token_axes(x)
    if not axes:
        return fn(output, x, *arrays)
    graphdef, params = split(output)
    x = output.factors(x)  # dtype of the gathered head

    def own(params: Any, *parts: jax.Array) -> Any:
        return fn(bind(graphdef, jax.tree.map(lambda leaf: vary(leaf, axes), params)), *parts)

    # Gathered in the type of the product, as the weights of layers are.
    params = jax.tree.map(lambda leaf: gather_over(leaf.astype(x.dtype), axes), params)
    rows = PartitionSpec(*jax.typeof(x).sharding.spec[:2])
    specs = (PartitionSpec(), *(rows for _ in (x, *arrays)))
    return jax.shard_map(own, in_specs=specs, out_specs=rows, axis_names=set(axes))(params, x, *arrays)


# (params, x of some tokens, other arrays of them) -> (loss, metrics); both are sums over tokens
TokenLoss = Callable[..., tuple[jax.Array, Any]]


def fused_linear_loss(
    fn: TokenLoss, chunks: int, axes: tuple[str, ...], params: Any, x: jax.Array, *others: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the sum of `fn(params, x, *others)` over all tokens, differentiable in `params` and `x` (not the metrics).

    Args:
        fn: takes parameters gathered over `axes`, in the type of x, and one chunk of one device's tokens.
        chunks: parts of a row's tokens, one after another.
        axes: mesh axes that shard rows and length. Parameters are gathered over them once, and the gradient is
            scattered over them once; before that, it is summed over chunks in the type of x.
        params: a pytree of arrays.
        x: [batch, length, dim].
        others: [batch, length], such as targets and weights.

    Raises:
        UserError: the length on a device is not a multiple of `chunks`.
    """
    kept = jax.tree.map(lambda leaf: _only(leaf, axes), params)
    rows = PartitionSpec(*jax.typeof(x).sharding.spec[:2])

    def mapped(own: Callable[..., Any], out_specs: Any, params: Any, *arrays: jax.Array) -> Any:
        # Not gathered by the mapped function: XLA would gather over the axes that are not mapped, too.
        params = jax.tree.map(lambda leaf: gather_over(leaf.astype(x.dtype), axes), params)
        specs = (PartitionSpec(), rows, *[rows] * len(others))
        return jax.shard_map(own, in_specs=specs, out_specs=out_specs, axis_names=set(axes))(params, *arrays)

    def own_sums(params: Any, *parts: jax.Array) -> Any:
        return _summed(map_chunks(partial(fn, _varying(params, axes)), chunks, *parts), axes)

    def own_gradients(whole: Any, *parts: jax.Array) -> Any:
        sums, d_params, d_x = _gradients(fn, chunks, _varying(whole, axes), *parts)
        return _summed(sums, axes), (_scattered(d_params, axes, kept, params), d_x)

    @jax.custom_vjp
    def total(params: Any, *arrays: jax.Array) -> Any:
        return mapped(own_sums, PartitionSpec(), params, *arrays)

    def forward(params: Any, *arrays: jax.Array) -> Any:
        # The layers' backward pass waits for the scattered gradient, so complete ones are freed when it begins.
        return jax.lax.optimization_barrier(mapped(own_gradients, (PartitionSpec(), (kept, rows)), params, *arrays))

    def backward(gradients: Any, cotangents: Any) -> Any:
        scaled = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), gradients)
        return *scaled, *[None] * len(others)

    total.defvjp(forward, backward)
    return total(params, x, *others)


def _varying(params: Any, axes: tuple[str, ...]) -> Any:
    return jax.tree.map(lambda leaf: vary(leaf, axes), params)


def _scattered(gradients: Any, axes: tuple[str, ...], kept: Any, like: Any) -> Any:
    """Return the gradients summed over devices, each keeping its part, in the type of the parameters; in the shard_map.

    `jax.lax.psum_scatter` would send half as much, but cannot be compiled where other axes of the mesh are not mapped
    over (jax 0.12), and libtpu 0.0.50 does not fuse this sum and slice into one, as it does for the layers' gradients.
    """

    def one(leaf: jax.Array, spec: PartitionSpec, like: jax.Array) -> jax.Array:
        leaf = _sum(leaf, axes)
        for dim, entry in enumerate(spec):
            if names := entry_axes(entry):
                size = leaf.shape[dim] // jax.lax.axis_size(names)
                leaf = jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(names) * size, size, dim)
        return leaf.astype(like.dtype)

    return jax.tree.map(one, gradients, kept, like)


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum over devices. On CPUs in float32: XLA's CPU compiler crashes on bfloat16 sums in a shard_map."""

    def wide(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)

    return jax.lax.platform_dependent(x, cpu=wide, default=lambda x: jax.lax.psum(x, axes))


def _gradients(fn: TokenLoss, chunks: int, params: Any, *parts: jax.Array) -> tuple[Any, Any, jax.Array]:
    """Return results of `fn` stacked over chunks, the summed gradient of `params`, and the gradient of all of x."""
    value_and_gradient = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)
    if chunks == 1:
        sums, (d_params, d_x) = value_and_gradient(params, *parts)
        return jax.tree.map(lambda a: a[None], sums), d_params, d_x

    def one(total: Any, part: list[jax.Array]) -> tuple[Any, Any]:
        sums, (d_params, d_x) = value_and_gradient(params, *part)
        return jax.tree.map(jnp.add, total, d_params), (sums, d_x)

    zeros = jax.tree.map(lambda leaf: vary(jnp.zeros_like(leaf), varying(leaf)), params)
    d_params, (sums, d_x) = jax.lax.scan(one, zeros, [split_length(part, chunks) for part in parts])
    return sums, d_params, merge_length(d_x)


def _summed(stacked: Any, axes: tuple[str, ...]) -> Any:
    """Return the sums over chunks and devices."""
    return jax.lax.psum(jax.tree.map(lambda a: jnp.sum(a, axis=0, dtype=a.dtype), stacked), axes)


def _only(x: jax.Array, axes: tuple[str, ...]) -> PartitionSpec:
    """Return the partition of x by these axes alone."""
    spec = jax.typeof(x).sharding.spec
    names = [tuple(name for name in entry_axes(entry) if name in axes) for entry in spec]
    return PartitionSpec(*(one or None for one in names))
