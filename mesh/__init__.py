"""Floor 0: named device meshes, logical-axis rules and everything that speaks to the devices.

Names are imported when they are first used: `mesh.errors` is known to the command line, which must
start without waiting for jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh.batches import shard_batch
    from mesh.devices import device_name
    from mesh.errors import UserError, did_you_mean
    from mesh.mesh import MESH_AXES, MeshError, make_mesh
    from mesh.programs.compilation import enable_compilation_cache
    from mesh.rules import constrain, partition, to_named_sharding

__all__ = [
    "MESH_AXES",
    "MeshError",
    "UserError",
    "constrain",
    "device_name",
    "did_you_mean",
    "enable_compilation_cache",
    "make_mesh",
    "partition",
    "shard_batch",
    "to_named_sharding",
]

_MODULES = {
    "MESH_AXES": "mesh",
    "MeshError": "mesh",
    "UserError": "errors",
    "constrain": "rules",
    "device_name": "devices",
    "did_you_mean": "errors",
    "enable_compilation_cache": "programs.compilation",
    "make_mesh": "mesh",
    "partition": "rules",
    "shard_batch": "batches",
    "to_named_sharding": "rules",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
