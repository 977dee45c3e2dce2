"""Logical axes -> mesh axes: the one small table behind every sharding in the stack.

Layers name the axes of their arrays by meaning ("embed", "heads"); this table says over which mesh axes each is
spread. Parameters and activations use different names where they are spread differently: the model width of a
parameter ("embed") is cut by fsdp, that of an activation (None) is not.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LOGICAL_AXES: dict[str, tuple[str, ...] | str | None] = {
    "batch": ("data", "fsdp", "expert"),
    "length": "sequence",
    "residual": ("sequence", "tensor"),  # the length between layers, where nothing needs heads or hidden units whole
    "embed": "fsdp",
    "heads": "tensor",
    "hidden": "tensor",
    "experts": "expert",
    "vocab": "tensor",
    "layers": "pipeline",
}


def partition(*axes: str | None) -> PartitionSpec | None:
    """The partition of an array whose axes carry these logical names, or None where no mesh is set.

    None is what `out_sharding=` and initialisers take for "unsharded", so layers also run without a mesh.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(None if axis is None else _mesh_axes(axis) for axis in axes))


def _mesh_axes(axis: str) -> tuple[str, ...] | str | None:
    """Where a logical axis is cut: axes of size 1 are left out, so that equal partitions are written equally."""
    names = tuple(name for name, size in axis_sizes(axis).items() if size > 1)
    return names if len(names) > 1 else names[0] if names else None


def axis_sizes(axis: str) -> dict[str, int]:
    """The mesh axes (and their sizes) over which a logical axis is spread; empty without a mesh.

    Inside a `shard_map` those that it maps over are left out: there, what is left is one device's part of them.
    """
    mesh, names = jax.sharding.get_abstract_mesh(), _names(axis)
    return {name: mesh.shape[name] for name in names if not mesh.empty and name not in mesh.manual_axes}


def batch_axes() -> tuple[str, ...]:
    """The mesh axes that spread the rows of a batch."""
    return _names("batch")


def manual_axis_sizes(axis: str) -> dict[str, int]:
    """Inside a `shard_map`: the mesh axes of a logical axis over which it maps, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in _names(axis) if name in mesh.manual_axes}


def _names(axis: str) -> tuple[str, ...]:
    names = LOGICAL_AXES[axis] or ()
    return (names,) if isinstance(names, str) else names


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Give a traced array the partition of these logical axes (what is newly made is born unsharded)."""
    spec = partition(*axes)
    return x if spec is None else jax.sharding.reshard(x, spec)


def to_named_sharding(abstract: Any, mesh: Mesh) -> Any:
    """Give the leaves of a `jax.eval_shape` result shardings on real devices (theirs name an abstract mesh)."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, getattr(a.sharding, "spec", PartitionSpec()))
        ),
        abstract,
    )
