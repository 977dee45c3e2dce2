"""Agreement of one process alone, and of two real ones."""

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mesh import MeshError, UserError, make_mesh, shard_batch
from mesh.batches import local_rows
from mesh.distributed import ProcessGroup, join
from tests.elsewhere import in_two_processes, to_host


def test_one_process_agrees_with_itself():
    alone = ProcessGroup("trainer")
    assert (alone.index, alone.count, alone.leader, alone.name) == (0, 1, True, "trainer")
    value = object()  # nothing is sent, so it need not be JSON
    assert alone.broadcast(value) is value
    assert alone.any(True) and not alone.any(False)
    assert alone.gather(value) == [value]
    alone.barrier()
    assert to_host(jax.numpy.arange(3)).tolist() == [0, 1, 2]


def test_two_processes_agree_and_share_one_mesh():
    leader, other = in_two_processes(agree)
    assert [leader["name"], other["name"]] == ["trainer", "trainer-1"]
    assert leader["shared"] == other["shared"] == [["of", "the leader", 0], None, {"a": 1}]
    assert leader["any"] == other["any"] == [True, True, False]
    assert leader["gathered"] == other["gathered"] == [{"index": 0}, {"index": 1}]
    assert leader["second"] == other["second"] == "of the second program"
    assert set(other["told"]) == {"trainer"}
    assert "trainer-1 has waited" in other["late"] and "for trainer" in other["late"]
    assert leader["keys"] < 10 and other["keys"] < 10, "keys that all have read are gone"
    for found in (leader, other):
        assert found["devices"] == [4, 2]
        assert found["batch"] and found["readable"]
        assert found["own rows lie where whole ones do"]
        assert "2 processes share it" in found["no axes"]
        assert "rows has 6 rows, which do not divide evenly over the mesh (data 2 x fsdp 2)" in found["uneven"]
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert (leader["own"]["data"], other["own"]["data"]) == (first, second)
    assert (leader["own"]["fsdp_tensor"], other["own"]["fsdp_tensor"]) == (first, second)
    # The axis with rows is within the processes: each needs all.
    assert leader["own"]["tensor_over_processes"] == other["own"]["tensor_over_processes"] == first + second
    assert leader["own"]["pipeline"] == other["own"]["pipeline"] == first + second
    assert (leader["own"]["mixed"], other["own"]["mixed"]) == ([0, 1, 4, 5], [2, 3, 6, 7])


def agree(address: str, index: int) -> dict[str, Any]:
    """All that the test looks at, as one of two processes finds it."""
    jax.config.update("jax_num_cpu_devices", 2)
    join(address, index, 2, role="trainer")
    told: list[str] = []
    ours = ProcessGroup("trainer", on_wait=lambda who, seconds: told.append(who), warn_after=0.5)
    found: dict[str, Any] = {"name": ours.name, "told": told}
    values = ["of", "the leader", index], None if index == 0 else 1, {"a": 1}
    found["shared"] = [ours.broadcast(value) for value in values]
    found["any"] = [ours.any(index == 0), ours.any(index == 1), ours.any(False)]
    found["gathered"] = ours.gather({"index": index})
    for _ in range(20):
        ours.broadcast("again")
        ours.barrier()
    if ours.leader:
        time.sleep(2.5)
    ours.broadcast("late")
    found["second"] = ProcessGroup("trainer").broadcast("of the second program" if index == 0 else "another")
    found["keys"] = len(ours._client.key_value_dir_get(ours._prefix))
    hasty = ProcessGroup("trainer", limit=0.5)
    if not ours.leader:
        try:
            hasty.broadcast(None)
        except TimeoutError as error:
            found["late"] = str(error)
    ours.barrier()
    return found | on_devices()


def on_devices() -> dict[str, Any]:
    """Arrays that are put on a mesh of both processes' devices, and read from it."""
    found: dict[str, Any] = {"devices": [jax.device_count(), jax.local_device_count()]}
    mesh = make_mesh({"data": 2, "fsdp": 2})
    batch = {"rows": np.arange(24).reshape(8, 3), "weights": np.arange(8.0), "scale": np.float32(2)}
    with jax.set_mesh(mesh):
        put = shard_batch(batch)
        found["uneven"] = error_of(lambda: shard_batch({"rows": np.zeros((6, 3))}))
    rows = PartitionSpec(("data", "fsdp"))
    assert put["rows"].sharding == NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    assert put["weights"].sharding == NamedSharding(mesh, rows) and not put["rows"].is_fully_addressable
    found["batch"] = all(
        np.array_equal(shard.data, batch[name][shard.index])
        for name, array in put.items()
        for shard in array.addressable_shards
    )
    found["readable"] = all(np.array_equal(to_host(array), batch[name]) for name, array in put.items())
    found["no axes"] = error_of(make_mesh)
    own_parts(found)
    return found


def own_parts(found: dict[str, Any]) -> None:
    """The rows that this process needs on several meshes, and what becomes of them."""
    a, b, c, d = jax.devices()
    meshes = {
        "data": make_mesh({"data": 4}),
        "fsdp_tensor": make_mesh({"fsdp": 2, "tensor": 2}),
        "tensor_over_processes": make_mesh({"fsdp": 2, "tensor": 2}, [a, c, b, d]),
        "pipeline": make_mesh({"pipeline": 2, "expert": 2}),
        "mixed": make_mesh({"data": 4}, [a, c, b, d]),
    }
    batch = {"tokens": np.arange(24).reshape(8, 3), "weights": np.arange(8.0)}
    found["own"], same = {}, []
    for name, mesh in meshes.items():
        with jax.set_mesh(mesh):
            own = local_rows(8)
            found["own"][name] = own.tolist()
            put, whole = shard_batch({k: x[own] for k, x in batch.items()}, rows=8), shard_batch(batch)
        for key, array in put.items():
            assert array.sharding == whole[key].sharding and array.shape == whole[key].shape
            shards = zip(array.addressable_shards, whole[key].addressable_shards, strict=True)
            same += [np.array_equal(ours.data, theirs.data) for ours, theirs in shards]
    found["own rows lie where whole ones do"] = all(same) and len(same) == 5 * 2 * 2


def error_of(action: Any) -> str:
    try:
        action()
    except (UserError, MeshError) as error:
        return str(error)
    return ""
