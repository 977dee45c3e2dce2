"""Checkpoints that several processes write together, and that any number of them reads again."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.checkpoint.versions import CheckpointError
from mesh import make_mesh
from mesh.devices import configure_cpu_devices
from mesh.distributed import join
from tests.chaos.faults import flip_bytes
from tests.elsewhere import in_two_processes

MESH = {"data": 2, "fsdp": 2}
SPECS = {"w": PartitionSpec("fsdp", "data"), "b": PartitionSpec(), "half": PartitionSpec(None, ("data", "fsdp"))}


def values(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    whole = {"w": rng.standard_normal((64, 32)), "b": rng.standard_normal(5), "half": rng.standard_normal((8, 4096))}
    return {name: x.astype(jnp.bfloat16 if name == "half" else np.float32) for name, x in whole.items()}


def state(step: int, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Parameters and what else a trainer has, on a mesh of one process or of several."""

    def put(x: Any, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda box: x[box])

    params = {name: put(x, SPECS[name]) for name, x in values(step).items()}
    moment = put(values(step + 100)["w"], SPECS["w"])
    return {"step": put(np.int32(step), PartitionSpec()), "params": params, "moment": moment}


def abstract(mesh: jax.sharding.Mesh) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0, mesh))


def same(ours: Any, expected: Any) -> bool:
    """Return whether both are equal to the bit on this process's devices."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
    return all(
        a.sharding == b.sharding and np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
        for a, b in pairs
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
    )


def make(directory: Path, steps: list[int], mesh: jax.sharding.Mesh) -> Checkpointer:
    checkpointer = Checkpointer.Config(keep=3).build(directory=directory)
    with jax.set_mesh(mesh):
        for step in steps:
            checkpointer.save(step, state(step, mesh), {"next": step})
    checkpointer.wait()
    return checkpointer


@pytest.mark.timeout(900)
def test_two_processes_write_and_one_reads_and_the_other_way_round(tmp_path: Path):
    one = make_mesh({"fsdp": 1}, jax.devices()[:1])
    make(tmp_path / "by one", [3], one).close()
    make(tmp_path / "damaged", [1, 2], one).close()
    flip_bytes(tmp_path / "damaged" / "2")
    for found in in_two_processes(as_one_of_two, str(tmp_path)):
        assert found["steps"] == [4, 6]
        assert found["of two"] == [True, {"next": 6}]
        assert found["of one"] == [True, {"next": 3}]
        assert "2 is damaged (the content of 'half'" in found["damaged"]
        assert "nearest older good step is 1" in found["damaged"]
    with jax.set_mesh(one):
        restored, extras = Checkpointer.Config().build(directory=tmp_path / "by two").restore(abstract(one))
    assert same(restored, state(6, one)) and extras == {"next": 6}
    params = restore_params(tmp_path / "by two")
    assert {name: x.tobytes() for name, x in params.items()} == {
        name: np.asarray(x).tobytes() for name, x in state(6, one)["params"].items()
    }
    make(tmp_path / "again by one", [6], one).close()
    assert manifest(tmp_path / "by two") == manifest(tmp_path / "again by one"), "checksums are of whole arrays"


def manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "6" / "manifest" / "metadata").read_text())


def as_one_of_two(address: str, index: int, folder: str) -> dict[str, Any]:
    """Save steps 4 and 6; restore what two processes have written, and what one has."""
    configure_cpu_devices(MESH, 2)
    join(address, index, 2)
    mesh, path = make_mesh(MESH), Path(folder)
    checkpointer = make(path / "by two", [4, 6], mesh)
    found: dict[str, Any] = {"steps": checkpointer.steps()}
    with jax.set_mesh(mesh):
        for name, source, step in (("of two", checkpointer, 6), ("of one", path / "by one", 3)):
            if isinstance(source, Path):
                source = Checkpointer.Config().build(directory=source)
            restored, extras = source.restore(abstract(mesh))
            found[name] = [same(restored, state(step, mesh)), extras]
        try:
            Checkpointer.Config().build(directory=path / "damaged").restore(abstract(mesh))
        except CheckpointError as error:
            found["damaged"] = str(error)
    checkpointer.close()
    return found
