"""Index ranges of real shardings: eight devices in one process, and two processes of four devices each."""

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mesh import make_mesh
from rl.parameter_server.index_ranges import (
    IndexRange,
    check_cover,
    covering,
    needed_index_ranges,
    owned_shards,
    shape_of,
    slices,
    volume,
)
from tests.elsewhere import elsewhere

MESHES = (
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
    {"expert": 8},
    {"tensor": 2},
    {"tensor": 4},
    {"data": 2, "tensor": 4},
    {"tensor": 1},
)
PAIRS = (
    ({"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}),
    ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "expert": 4}),
    ({"data": 8}, {"expert": 8}),
)  # of trainer and worker meshes over the eight devices of two processes
TENSORS: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "embedding": ((40, 16), PartitionSpec("tensor", "fsdp")),
    "layers/projection": ((3, 16, 24), PartitionSpec(None, "fsdp", "tensor")),
    "experts/up": ((8, 8, 16), PartitionSpec("expert", "fsdp", "tensor")),
    "experts/all": ((16, 6), PartitionSpec(("expert", "fsdp", "tensor"))),
    "norm/scale": ((16,), PartitionSpec()),
    "temperature": ((), PartitionSpec()),
}


def test_moving_by_index_ranges_is_device_put() -> None:
    moved = elsewhere(move_everything, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    assert moved["pairs"] == len(MESHES) ** 2 * len(TENSORS)
    assert moved["elements"] == moved["union"]  # each needed element once, and nothing else


def test_replicas_take_turns() -> None:
    owners = elsewhere(owners_by_turn, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    assert owners == [[[turn % 8] for turn in range(10)], [[0, 1], [2, 3]] * 5]


def test_two_processes_own_everything_once_and_need_only_their_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(elsewhere, one_of_two, address, process, environ=environ) for process in (0, 1)]
        both = [call.result() for call in calls]
    for pair, name in itertools.product(range(len(PAIRS)), TENSORS):
        owned = [as_index_range(index_range) for process in both for index_range in process[pair][name]["owned"]]
        check_cover(name, TENSORS[name][0], owned)
        for index_range in [
            as_index_range(index_range) for process in both for index_range in process[pair][name]["needed"]
        ]:
            assert sum(map(volume, covering(index_range, owned))) == volume(index_range)
    # On a mesh whose tensor axis lies within a process, each needs all 96 elements; over eight devices, its half.
    needed = [
        [sum(volume(as_index_range(index_range)) for index_range in pair["experts/all"]["needed"]) for pair in process]
        for process in both
    ]
    assert needed == [[96, 48, 48]] * 2


def move_everything() -> dict[str, int]:
    """Move each tensor from each mesh to each other one with numpy; return how many were moved, and the fewest."""
    elements = union = pairs = 0
    for (name, (shape, spec)), source, target in itertools.product(TENSORS.items(), MESHES, MESHES):
        value = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        sent = [
            (index_range, np.asarray(data))
            for index_range, data in owned_shards(jax.device_put(value, on(source, spec)))
        ]
        check_cover(name, shape, [index_range for index_range, _ in sent])
        there = on(target, spec)
        expected = {shard.device: np.asarray(shard.data) for shard in jax.device_put(value, there).addressable_shards}
        wanted = np.zeros(shape, bool)
        for index_range, devices in needed_index_ranges(there, shape).items():
            arrived, moved = assemble(index_range, sent)
            elements += moved
            assert all(np.array_equal(arrived, expected.pop(device)) for device in devices)
            wanted[tuple(slice(*ends) for ends in index_range)] = True
        assert not expected
        union, pairs = union + int(wanted.sum()), pairs + 1
    return {"pairs": pairs, "elements": elements, "union": union}


def assemble(index_range: IndexRange, held: list[tuple[IndexRange, np.ndarray]]) -> tuple[np.ndarray, int]:
    """Assemble the index range from shards; return it and the number of elements read."""
    arrived, moved = np.full(shape_of(index_range), np.nan, np.float32), 0
    for part in covering(index_range, [shard for shard, _ in held]):
        shard, data = next((shard, data) for shard, data in held if covering(part, [shard]) == [part])
        arrived[(*slices(part, index_range), ...)] = data[(*slices(part, shard), ...)]
        moved += volume(part)
    return arrived, moved


def owners_by_turn() -> list[list[list[int]]]:
    """The devices that send, by turn: of a tensor that eight devices hold, and of halves that two devices each do."""
    arrays = [
        jax.device_put(np.zeros(8), on({"data": 8}, PartitionSpec())),
        jax.device_put(np.zeros(8), on({"tensor": 2, "data": 2}, PartitionSpec("tensor"))),
    ]
    return [
        [sorted(device.id for _, data in owned_shards(array, turn) for device in data.devices()) for turn in range(10)]
        for array in arrays
    ]


def one_of_two(address: str, process: int) -> list[dict[str, Any]]:
    """Return what one of two processes owns on one mesh and needs on another, for all pairs, by tensor."""
    jax.distributed.initialize(address, 2, process)
    found: list[dict[str, Any]] = [{} for _ in PAIRS]
    for (trainer, worker), by_tensor in zip(PAIRS, found, strict=True):
        for name, (shape, spec) in TENSORS.items():
            array = jax.make_array_from_callback(shape, on(trainer, spec), lambda i, s=shape: np.zeros(s)[i])
            by_tensor[name] = {
                "owned": [index_range for index_range, _ in owned_shards(array)],
                "needed": list(needed_index_ranges(on(worker, spec), shape)),
            }
    return found


def on(mesh: dict[str, int], spec: PartitionSpec) -> NamedSharding:
    size = int(np.prod(list(mesh.values())))
    return NamedSharding(make_mesh(mesh, jax.devices()[:size]), spec)


def as_index_range(ends: list[list[int]]) -> IndexRange:
    return tuple((start, stop) for start, stop in ends)
