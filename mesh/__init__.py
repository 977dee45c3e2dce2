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

_MODULES = (
    "errors",
    "mesh",
    "rules",
    "batches",
    "devices",
    "programs.compilation",
)  # modules in the order of search, those without jax first


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            if name in vars(found := import_module(f"{__name__}.{module}")):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
