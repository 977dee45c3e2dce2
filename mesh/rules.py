"""Logical axes -> mesh axes: the one small table behind every sharding in the stack.

Layers name the axes of their arrays by meaning ("embed", "heads"); this table says over which mesh axes each is
spread. Parameters and activations use different names where they are spread differently: the model width of a
parameter ("embed") is cut by fsdp, that of an activation (None) is not.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Give a traced array the partition of these logical axes (what is newly made is born unsharded)."""
    spec = partition(*axes)
    return x if spec is None else jax.sharding.reshard(x, spec)


def shard_batch(tree: Any) -> Any:
    """Put host arrays on the devices of the mesh in force, spread along their first axis (scalars: copied)."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(tree)
    return jax.tree.map(
        lambda x: jax.device_put(x, partition(*(["batch"] + [None] * (x.ndim - 1))[: x.ndim])), tree
    )


def to_named_sharding(abstract: Any, mesh: Mesh) -> Any:
    """Give the leaves of a `jax.eval_shape` result shardings on real devices (theirs name an abstract mesh)."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, getattr(a.sharding, "spec", PartitionSpec()))
        ),
        abstract,
    )
