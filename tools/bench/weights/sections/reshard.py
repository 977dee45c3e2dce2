"""Bytes requested by a worker, divided by those its devices need (each box once), from one sharding to another.

Measured with eight virtual devices through a parameter server over sockets; received arrays are compared to the bit.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.layers.base import Params
from mesh import make_mesh
from tools.bench.weights.sections import model
from tools.bench.weights.sections.roles import Process

TRAINER = {"fsdp": 4, "tensor": 2}
WORKERS = ({"tensor": 2}, {"tensor": 4}, {"fsdp": 8}, {})
_CUT_OUTPUTS = PartitionSpec("fsdp", "tensor")  # matrices whose outputs are sharded over `tensor`
_CUT_INPUTS = PartitionSpec("tensor", "fsdp")
_SPECS = dict.fromkeys(("query", "key", "value", "gate", "up"), _CUT_OUTPUTS) | dict.fromkeys(
    ("output", "down", "table"), _CUT_INPUTS
)


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the keys `reshard_overread`, the worst of all, and `reshard`."""
    cut = model.TINY if quick else 4
    moved = {}
    with Process("resharding", devices=8) as process:
        for worker in WORKERS[: 2 if quick else None]:
            moved[_name(worker)] = process.ask("overread", trainer=TRAINER, worker=worker, cut=cut)
    overread = {name: max(one["read"], one["network"]) / one["needed"] for name, one in moved.items()}
    return {
        "reshard_overread": max(overread.values()),
        "reshard": {"trainer": _name(TRAINER), "overread": overread, "bytes": moved},
    }


def spread(mesh_shape: dict[str, int], cut: int) -> Params:
    """Return the weights on a mesh of these axes, sharded as a transformer's would be."""
    mesh = make_mesh(mesh_shape, jax.devices()[: math.prod(mesh_shape.values())])

    def put(path: Any, leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, _SPECS.get(path[-1].key, PartitionSpec())))

    return jax.tree_util.tree_map_with_path(put, model.random_weights(cut))


def _name(mesh_shape: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh_shape.items()) or "one device"
