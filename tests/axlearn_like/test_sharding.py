"""What the mesh is changes where arrays lie and how devices talk, and no result."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.axlearn_like.sharded import MESHES

# Compiling is all that takes time here; how devices talk is decided before these passes.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SHARDED = [name for name, shape in MESHES.items() if shape]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> dict[str, dict[str, np.ndarray]]:
    """Mesh -> what sharded.py found, by a process with eight devices."""
    path = tmp_path_factory.mktemp("sharded") / "results.npz"
    done = subprocess.run(
        [sys.executable, "-m", "tests.axlearn_like.sharded", str(path)],
        cwd=checkout,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in MESHES}
    with np.load(path) as file:
        for key in file.files:
            mesh, name = key.split("/")
            found[mesh][name] = file[key]
    return found


def part(result: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in result.items() if key.startswith(prefix)}


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "none"])
def test_loss_and_gradients_are_those_without_a_mesh(results, mesh):
    expected, found = results["none"], results[mesh]
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    gradients = part(expected, "gradient.")
    assert len(gradients) == 14
    for name, gradient in gradients.items():
        scale = np.abs(gradient).max()
        assert scale > 1e-4
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "none"])
def test_parameters_are_born_the_same_everywhere(results, mesh):
    for name, value in part(results["none"], "born.").items():
        np.testing.assert_allclose(results[mesh][name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("mesh", SHARDED)
def test_parameters_lie_in_parts(results, mesh):
    shape = MESHES[mesh] or {}
    assert results[mesh]["shards"] == math.prod(shape.get(axis, 1) for axis in ("pipeline", "fsdp", "tensor"))


def test_devices_talk_only_where_there_are_several(results):
    for mesh in MESHES:
        calls = {name: int(count) for name, count in part(results[mesh], "collectives.").items()}
        if mesh in SHARDED:
            assert calls["collectives.all-gather"] > 0, mesh  # of fsdp's parameters
            assert calls["collectives.all-reduce"] + calls["collectives.reduce-scatter"] > 0, mesh
        else:
            assert set(calls.values()) == {0}, mesh


def test_tensor_parallelism_adds_its_own_sums(results):
    """Of attention's and the feed-forward's outputs, forwards and backwards: these go over activations."""
    fsdp, tensor = (int(results[m]["collectives.all-reduce"]) for m in ("fsdp", "fsdp_tensor"))
    assert tensor > fsdp
