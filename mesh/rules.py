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
    "embed": "fsdp",
    "heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    "layers": None,
}


def partition(*axes: str | None) -> PartitionSpec | None:
    """The partition of an array whose axes carry these logical names, or None where no mesh is set.

    None is what `out_sharding=` and initialisers take for "unsharded", so layers also run without a mesh.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(None if axis is None else LOGICAL_AXES[axis] for axis in axes))


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

    On a mesh of several processes each has the whole arrays, and puts what its own devices need on them.

    Raises:
        UserError: an array has a number of rows that does not divide over the mesh.
    """
    sizes = axis_sizes("batch")
    if not sizes:
        return jax.device_put(tree)
    ways, mesh = math.prod(sizes.values()), jax.sharding.get_mesh()
    alone = mesh.empty or not mesh.is_multi_process

    def put(path: Any, x: Any) -> jax.Array:
        if x.ndim and x.shape[0] % ways:
            over = " x ".join(f"{name} {size}" for name, size in sizes.items())
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
            raise UserError(f"batch: {name} has {x.shape[0]} rows, which do not divide evenly over the mesh ({over})")
        spec = partition(*["batch"] * min(x.ndim, 1), *[None] * (x.ndim - 1))
        if alone:
            return jax.device_put(x, spec)
        # device_put would compare the arrays of all processes first, over the network.
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec or PartitionSpec()), lambda box: x[box])

    return jax.tree_util.tree_map_with_path(put, tree)


def to_named_sharding(abstract: Any, mesh: Mesh) -> Any:
    """Give the leaves of a `jax.eval_shape` result shardings on real devices (theirs name an abstract mesh)."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, getattr(a.sharding, "spec", PartitionSpec()))
        ),
        abstract,
    )
