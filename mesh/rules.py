"""Logical axes -> mesh axes: the one small table behind every sharding in the stack.

Layers name the axes of their arrays by meaning ("embed", "heads"); this table says over which mesh axes each is
spread. Parameters and activations use different names where they are spread differently: the model width of a
parameter ("embed") is cut by fsdp, that of an activation (None) is not.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mesh.errors import UserError

LOGICAL_AXES: dict[str, tuple[str, ...] | str | None] = {
    "batch": ("data", "fsdp"),
    "length": "sequence",
    "residual": ("sequence", "tensor"),  # the length between layers, where nothing needs heads or hidden units whole
    "embed": "fsdp",
    "heads": "tensor",
    "hidden": "tensor",
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
    """The mesh axes (and their sizes) over which a logical axis is spread; empty without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    names = LOGICAL_AXES[axis] or ()
    return {name: mesh.shape[name] for name in ((names,) if isinstance(names, str) else names) if not mesh.empty}


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Give a traced array the partition of these logical axes (what is newly made is born unsharded)."""
    spec = partition(*axes)
    return x if spec is None else jax.sharding.reshard(x, spec)


def shard_batch(tree: Any) -> Any:
    """Put host arrays on the devices of the mesh in force, spread along their first axis (scalars: copied).

    Raises:
        UserError: an array has a number of rows that does not divide over the mesh.
    """
    sizes = axis_sizes("batch")
    if not sizes:
        return jax.device_put(tree)
    ways, first = math.prod(sizes.values()), partition("batch") or ()

    def spread(path: Any, x: Any) -> PartitionSpec:
        if x.ndim and x.shape[0] % ways:
            over = " x ".join(f"{name} {size}" for name, size in sizes.items())
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
            raise UserError(f"batch: {name} has {x.shape[0]} rows, which do not divide evenly over the mesh ({over})")
        return PartitionSpec(*first, *[None] * (x.ndim - 1)) if x.ndim else PartitionSpec()

    # All at once: a call for each array costs the host a third more.
    return jax.device_put(tree, jax.tree_util.tree_map_with_path(spread, tree))


def to_named_sharding(abstract: Any, mesh: Mesh) -> Any:
    """Give the leaves of a `jax.eval_shape` result shardings on real devices (theirs name an abstract mesh)."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, getattr(a.sharding, "spec", PartitionSpec()))
        ),
        abstract,
    )
