"""Frozen matrices of adapted layers as int8 numbers, with a scale for each output in an array of its own."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from axlearn_like.layers.parameter_names import axes_of_matrix, path_name, shape_suffix


def scale_name(name: str, ndim: int) -> str:
    """Return the path of what each output of a matrix has, for stacks of layers too: `q_dkqh` -> `q_scale_kqh`."""
    suffix = shape_suffix(name, ndim)
    stack, _, outputs = ("".join(suffix[axis] for axis in part) for part in axes_of_matrix(name, len(suffix)))
    return f"{name.removesuffix(f'_{suffix}')}_scale_{stack}{outputs}"


def int8_numbers(name: str, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the nearest int8 numbers of a matrix, or a stack of them, and their float32 scales.

    >>> import jax.numpy as jnp
    >>> from axlearn_like.layers.wrappers.int8_base import float_matrix, int8_numbers
    >>> numbers, scale = int8_numbers("up_df", jnp.array([[1.27, 0.5], [-0.3, 0.0]]))
    >>> numbers.tolist()
    [[127, 127], [-30, 0]]
    >>> (100 * float_matrix("up_df", numbers, scale)).round().astype(int).tolist()
    [[127, 50], [-30, 0]]
    """
    inputs = axes_of_matrix(name, weight.ndim).inputs
    scale = jnp.maximum(jnp.max(jnp.abs(weight), axis=inputs), jnp.finfo(jnp.float32).tiny) / 127
    return jnp.round(weight / jnp.expand_dims(scale, inputs)).astype(jnp.int8), scale


def float_matrix(name: str, numbers: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the matrix of such numbers, in the type of its scales."""
    return numbers.astype(scale.dtype) * jnp.expand_dims(scale, axes_of_matrix(name, numbers.ndim).inputs)


def int8_source(wanted: Any) -> Any:
    """Return a described array, of int8 numbers as the float32 matrix that they are made of, in the host's memory."""
    if wanted.dtype != jnp.int8:
        return wanted
    where = wanted.sharding
    if isinstance(where, NamedSharding):
        where = where.with_memory_kind("pinned_host")  # the devices may have no room for all of them
    return jax.ShapeDtypeStruct(wanted.shape, jnp.float32, sharding=where)


def int8_params(plain: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer's parameters as LoRA holds them: `inner` and, in `base`, the scales. Traced.

    Args:
        plain: the inner layer's, of `int8_source`.
        wanted: those of the wrapper, described.
    """
    scales: dict[str, jax.Array] = {}

    def held(path: tuple[Any, ...], leaf: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
        if to.dtype != jnp.int8:
            return leaf
        name, here = path_name(path), jax.device_put(leaf, jax.memory.Space.Device)
        numbers, scales[scale_name(name, leaf.ndim)] = int8_numbers(name, here)
        return numbers

    inner = jax.tree_util.tree_map_with_path(held, plain, wanted["inner"])
    base = jax.tree_util.tree_map_with_path(lambda path, _: scales[path_name(path)], wanted["base"])
    return {"inner": inner, "base": base}
