"""The mesh axes that shard a traced array, and operations that keep or change them.

Everywhere the partition is read from the array's own type (explicit sharding); without a mesh nothing is sharded.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mesh.rules import axis_sizes, constrain


def full_spec(x: jax.Array) -> PartitionSpec | None:
    """Return the partition of x with an entry for each axis; None where no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return None
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a partition."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def token_axes(x: jax.Array) -> tuple[str, ...]:
    """Return the mesh axes that shard the first two axes of x, [batch, length, ...]."""
    entries = () if (spec := full_spec(x)) is None else spec[:2]
    return tuple(name for entry in entries for name in entry_axes(entry))


def length_axes(x: jax.Array) -> Any:
    """Return the partition's entry for the second axis of x, [batch, length, ...]; None if that is not sharded."""
    spec = full_spec(x)
    return None if spec is None or x.ndim < 2 else spec[1]


def shard_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return x [batch, length], sharded as the first two axes of `other` are."""
    spec = full_spec(other)
    return x if spec is None else jax.sharding.reshard(x, PartitionSpec(*spec[:2]))


def gather_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return x gathered over these mesh axes; it stays sharded over the others."""
    spec = full_spec(x)
    assert spec is not None
    kept = [tuple(name for name in entry_axes(entry) if name not in axes) for entry in spec]
    return jax.sharding.reshard(x, PartitionSpec(*(names or None for names in kept)))


def gather_length(x: jax.Array) -> jax.Array:
    """Return x [batch, length, ...] with its length gathered over the axes that will shard heads, units and words."""
    names = entry_axes(length_axes(x))
    kept = tuple(name for name in names if name not in axis_sizes("heads"))
    if kept == names:
        return x
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, PartitionSpec(spec[0], kept or None, *spec[2:]))


def shard_residual(x: jax.Array) -> jax.Array:
    """Return x [batch, length, ...] with its length sharded as far as it can be between layers, if it divides evenly.

    The norms and sums there cost every device of a tensor-parallel group the same work on the same numbers otherwise
    (Korthikanti et al. 2022, arXiv 2205.05198).
    """
    parts = math.prod(axis_sizes("residual").values())
    if parts == 1 or x.shape[1] % parts:
        return x
    return constrain(x, "batch", "residual", *[None] * (x.ndim - 2))


def split_rows(x: jax.Array, count: int) -> jax.Array:
    """Reshape [batch, ...] to [count, batch / count, ...]; part i has the rows i, i + count, ...

    Contiguous parts of a sharded axis would each live on a few devices only. With strided parts every device
    contributes equally to every part, and nothing is communicated.
    """
    spec = full_spec(x)
    out = None if spec is None else PartitionSpec(spec[0], None, *spec[1:])
    return jnp.swapaxes(jnp.reshape(x, (x.shape[0] // count, count, *x.shape[1:]), out_sharding=out), 0, 1)


def merge_rows(x: jax.Array) -> jax.Array:
    """Reshape [count, batch / count, ...] to [batch, ...], the inverse of `split_rows`."""
    spec = full_spec(x)
    out = None if spec is None else PartitionSpec(spec[1], *spec[2:])
    x = jnp.swapaxes(x, 0, 1)
    return jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]), out_sharding=out)


def varying(x: jax.Array) -> frozenset[str]:
    """Return the manual axes over which x may vary; empty outside of a shard_map."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def vary[T: jax.Array](x: T, axes: Iterable[str]) -> T:
    """Return x as a value that may vary over these axes too; its gradient is summed over those that are new."""
    new = tuple(sorted(set(axes) - varying(x)))
    return jax.lax.pcast(x, new, to="varying") if new else x
