"""Bytes requested by a worker, divided by those its devices need (each box once), from one sharding to another.

Measured with eight virtual devices through a parameter server over sockets; received arrays are compared to the bit.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.layers.base import Params
from mesh import make_mesh
from rl.parameter_server.client import connect
from rl.parameter_server.server import ParameterServer
from tools.bench.harness.processes import in_process
from tools.bench.weights.sections import model

TRAINER = {"fsdp": 4, "tensor": 2}
WORKERS = {"tensor 2": {"tensor": 2}, "tensor 4": {"tensor": 4}, "fsdp 8": {"fsdp": 8}, "one device": {}}
_CUT_OUTPUTS = PartitionSpec("fsdp", "tensor")  # matrices whose outputs are sharded over `tensor`
_CUT_INPUTS = PartitionSpec("tensor", "fsdp")
_SPECS = dict.fromkeys(("query", "key", "value", "gate", "up"), _CUT_OUTPUTS) | dict.fromkeys(
    ("output", "down", "table"), _CUT_INPUTS
)


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the keys `reshard_overread`, the worst of all, and `reshard`."""
    cut, names = (model.TINY, list(WORKERS)[:2]) if quick else (4, list(WORKERS))
    with in_process(Resharding, devices=8) as process:
        moved = {name: process.overread(trainer=TRAINER, worker=WORKERS[name], cut=cut) for name in names}
    overread = {name: max(one["read"], one["network"]) / one["needed"] for name, one in moved.items()}
    reshard = {"trainer": "fsdp 4 x tensor 2", "overread": overread, "bytes": moved}
    return {"reshard_overread": max(overread.values()), "reshard": reshard}


class Resharding:
    """A process that publishes from one mesh of virtual devices and pulls to another."""

    def __init__(self, devices: int):
        jax.config.update("jax_num_cpu_devices", devices)

    def overread(self, trainer: dict[str, int], worker: dict[str, int], cut: int) -> dict[str, int]:
        """Return the bytes needed and requested, and those that travelled."""
        server = ParameterServer.Config(shared_memory=False).build()
        access = connect(server.cfg, [server.listen])
        access.publisher().publish_async(_sharded(trainer, cut), 0).wait()
        like = _sharded(worker, cut)
        receiver = access.receiver(like)
        pulled = receiver.pull(0)
        if not all(map(jax.numpy.array_equal, jax.tree.leaves(pulled), jax.tree.leaves(like))):
            raise AssertionError(f"{trainer} -> {worker}: other weights came")
        server.close()
        stats = receiver.stats
        return {"needed": stats.needed, "read": stats.read, "network": stats.network}


def _sharded(mesh_shape: dict[str, int], cut: int) -> Params:
    """Return the weights on a mesh of these axes, sharded as a transformer's would be."""
    mesh = make_mesh(mesh_shape, jax.devices()[: math.prod(mesh_shape.values())])

    def put(path: Any, leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, _SPECS.get(path[-1].key, PartitionSpec())))

    return jax.tree_util.tree_map_with_path(put, model.random_weights(cut))
