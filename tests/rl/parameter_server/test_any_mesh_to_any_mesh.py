"""Any trainer mesh to any worker mesh, in one process and in several: the same bits, and the fewest bytes."""

import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.layers.base import Params
from mesh import make_mesh
from rl.parameter_server.client import ParameterServerClient, connect
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.push.publisher import Pusher
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.endpoint import Endpoint
from tests.elsewhere import ROOT, elsewhere
from tests.rl.parameter_server.small import host
from tests.rl.parameter_server.test_server import Deployment

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
SPECS = {
    "embedding": ((40, 16), PartitionSpec("tensor", "fsdp")),
    "projection": ((3, 16, 24), PartitionSpec(None, "fsdp", "tensor")),
    "experts": ((8, 8, 16), PartitionSpec("expert", "fsdp", "tensor")),
    "scale": ((16,), PartitionSpec()),
}
TRAINERS = ({"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "expert": 2}, {"data": 8})
WORKERS = ({"tensor": 2}, {"tensor": 4}, {"expert": 4}, {}, {"fsdp": 8})


def on_mesh(mesh_shape: dict[str, int], version: int) -> Params:
    """The weights of a version, spread over a mesh of these axes (and over the processes that share it)."""
    mesh = make_mesh(mesh_shape, jax.devices()[: math.prod(mesh_shape.values())])
    values = whole(version)

    def put(name: str) -> jax.Array:
        shape, spec = SPECS[name]
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: values[name][index])

    return {name: put(name) for name in SPECS}


def whole(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(version)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, (shape, _) in SPECS.items()}


def same_everywhere(params: Params, version: int) -> bool:
    """Return True if every device of this process holds the right values."""
    return all(
        np.array_equal(np.asarray(shard.data), whole(version)[name][shard.index])
        for name, array in params.items()
        for shard in array.addressable_shards
    )


def local_bytes(params: Params) -> int:
    """Return the bytes of this process's distinct index ranges: the least that has to move."""
    return sum(
        {str(shard.index): shard.data.nbytes for shard in array.addressable_shards}[index]
        for array in params.values()
        for index in {str(shard.index) for shard in array.addressable_shards}
    )


# ---- one process


def test_every_pair_of_meshes():
    for pair, same, moved, least in elsewhere(every_pair, environ=EIGHT):
        assert same, pair
        assert moved == least, pair


def every_pair() -> list[tuple[str, bool, int, int]]:
    found, version = [], 0
    server = ParameterServer.Config(shared_memory=False, shard_servers=1).build()
    client = connect(server.cfg, [server.listen])
    publisher = client.publisher()
    for trainer in TRAINERS:
        publisher.publish_async(on_mesh(trainer, version), version).wait()
        for worker in WORKERS:
            like = on_mesh(worker, 99)
            receiver = client.receiver(like)
            params = receiver.pull(version)
            found.append(
                (
                    f"{trainer} -> {worker}",
                    same_everywhere(params, version),
                    receiver.stats.network,
                    local_bytes(like),
                )
            )
        version += 1
    return found


# ---- several processes on both sides


def test_two_trainer_processes_to_two_worker_processes_through_three_shard_servers():
    deployment = Deployment(ParameterServer.Config(shared_memory=False, shard_servers=3), remote=True)
    places = endpoints(deployment)
    with ThreadPoolExecutor(4) as pool:
        address = free_address()
        trainers = [pool.submit(elsewhere, train, places, address, p, environ=FOUR) for p in (0, 1)]
        address = free_address()
        workers = [pool.submit(elsewhere, work, places, address, p, environ=FOUR) for p in (0, 1)]
        pushed = sum(trainer.result() for trainer in trainers)
        pulled = [worker.result() for worker in workers]
    manifest = deployment.connect().directory.manifest(1)
    deployment.close()
    assert pushed == sum(array.nbytes for array in whole(1).values())  # each byte once, though data is replicated
    assert {shard.server for shard in manifest.shards} == {0, 1, 2}
    for same, moved, least in pulled:
        assert same and moved == least


def train(places: list[dict[str, Any]], address: str, process: int) -> int:
    """Publish versions 0 and 1; return the bytes of this process's part of one."""
    jax.distributed.initialize(address, 2, process)
    publisher = reach(places).publisher(pusher=Pusher("one trainer", process, 2))
    nbytes = 0
    for version in (0, 1):
        push = publisher.publish_async(on_mesh({"data": 2, "fsdp": 2, "tensor": 2}, version), version)
        push.wait()
        nbytes = push.snapshot().nbytes
    return nbytes


def work(places: list[dict[str, Any]], address: str, process: int) -> tuple[bool, int, int]:
    """Pull version 1 for a mesh over both worker processes."""
    jax.distributed.initialize(address, 2, process)
    like = on_mesh({"expert": 2, "tensor": 4}, 99)
    receiver = reach(places).receiver(like)
    params = receiver.pull(1, timeout=100)
    return same_everywhere(params, 1), receiver.stats.network, local_bytes(like)


# ---- a pusher that dies


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before its last shard", pytest.param("before its commit", marks=pytest.mark.full)])
def test_half_a_version_is_never_seen_and_its_successor_publishes_the_whole(when: str):
    deployment = Deployment(ParameterServer.Config(shared_memory=False, shard_servers=2), remote=True)
    program = f"import {__name__} as m; m.die_while_pushing({endpoints(deployment)!r}, {when!r})"
    command = [sys.executable, "-c", program]
    died = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, check=False
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    client = deployment.connect()
    assert client.directory.latest() == -1
    assert deployment.held() > 0  # what it pushed is there, and to be had by nobody
    with pytest.raises(WeightsError, match="version 0 not published"):
        client.receiver(on_mesh({}, 0)).pull(0)
    publisher = client.publisher()
    publisher.publish_async(on_mesh({}, 5), 0).wait()  # other contents: nothing of the dead one's is left in it
    assert host(client.receiver(on_mesh({}, 0)).pull(0)) == host(whole(5))
    expected = sum(array.nbytes for array in whole(5).values())
    assert deployment.held_soon(expected) == expected
    deployment.close()


def die_while_pushing(places: list[dict[str, Any]], when: str) -> None:
    client = reach(places)
    last = client.publisher()
    if when == "before its commit":
        last._directory.commit = lambda commit: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore
    else:
        server = last._servers[1]
        server.write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore
    last.publish_async(on_mesh({}, 0), 0).wait()


def endpoints(deployment: Deployment) -> list[dict[str, Any]]:
    return [dataclasses.asdict(server.listen()) for server in deployment.servers]


def reach(places: list[dict[str, Any]]) -> ParameterServerClient:
    cfg = ParameterServer.Config(shared_memory=False, shard_servers=len(places))
    return connect(cfg, [lambda place=place: Endpoint(**place) for place in places])


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"
