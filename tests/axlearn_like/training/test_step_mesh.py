"""A mesh changes where arrays are stored and how devices communicate, and no result."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mesh import MESH_AXES
from tests.axlearn_like.training.step_mesh import MESHES, SETS

pytestmark = pytest.mark.numerics

# Compiling is all that takes time here; how devices talk is decided before these passes.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SHARDED = [name for name, case in MESHES.items() if case.mesh]

Results = dict[str, dict[str, np.ndarray]]


def run_set(which: str, path: Path, checkout: Path) -> Results:
    """Mesh -> what step_mesh.py found, by a process with eight devices."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.axlearn_like.training.step_mesh", str(path), which],
        cwd=checkout,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Results = {name: {} for name in SETS[which]}
    with np.load(path) as file:
        for key in file.files:
            mesh, name = key.split("/")
            found[mesh][name] = file[key]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Results:
    return run_set("meshes", tmp_path_factory.mktemp("sharded") / "results.npz", checkout)


def part(result: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in result.items() if key.startswith(prefix)}


def assert_same_step(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Loss, gradients, of which none is nearly zero, and new parameters."""
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    for name, gradient in part(expected, "gradient.").items():
        scale = np.abs(gradient).max()
        assert scale > 1e-4
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-5 * scale, err_msg=name)
        # Adam's first step goes by the sign, which is not known of what is nearly zero.
        sure, new = np.abs(gradient) > 1e-4 * scale, name.replace("gradient.", "new.")
        assert sure.mean() > 0.3
        np.testing.assert_allclose(found[new][sure], expected[new][sure], rtol=1e-6, atol=1e-6, err_msg=new)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "none"])
def test_loss_and_gradients_are_those_without_a_mesh(results, mesh):
    assert len(part(results["none"], "gradient.")) == 14
    assert_same_step(results[mesh], results["none"])


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("which", ["more", "experts"])
def test_every_axis_alone_and_every_pair_give_what_one_device_gives(which, tmp_path, checkout):
    found = run_set(which, tmp_path / "results.npz", checkout)
    for name in SETS[which]:
        assert_same_step(found[name], found["none"])
    if which == "more":
        assert sum(part(found["one"], "collectives.").values()) == 0, "one device talks to none"
        # The outputs of attention and feed-forward are summed over devices, forwards and backwards.
        fsdp, tensor = (int(found[name]["collectives.all-reduce"]) for name in ("fsdp", "fsdp_tensor"))
        assert tensor > fsdp, "tensor parallelism adds its own sums"
        assert [int(found[name]["shards"]) for name in ("fsdp", "fsdp_tensor", "rules")] == [8, 8, 8]


def test_no_axis_and_no_pair_of_axes_is_left_out():
    meshes = [case.mesh or {} for cases in SETS.values() for case in cases.values()]
    shapes = [{axis for axis, size in mesh.items() if size > 1} for mesh in meshes]
    wanted = [{axis} for axis in MESH_AXES] + [set(pair) for pair in itertools.combinations(MESH_AXES, 2)]
    alone, together = wanted[: len(MESH_AXES)], wanted[len(MESH_AXES) :]
    assert [axis for axis in alone if axis not in shapes] == []
    assert [pair for pair in together if not any(pair <= shape for shape in shapes)] == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "none"])
def test_parameters_are_born_the_same_everywhere(results, mesh):
    for name, value in part(results["none"], "born.").items():
        np.testing.assert_allclose(results[mesh][name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SHARDED)
def test_parameters_lie_in_parts(results, mesh):
    shape = MESHES[mesh].mesh or {}
    assert results[mesh]["shards"] == math.prod(shape.get(axis, 1) for axis in ("pipeline", "fsdp", "tensor"))


@pytest.mark.slow
def test_devices_talk_only_where_there_are_several(results):
    for mesh in MESHES:
        calls = {name: int(count) for name, count in part(results[mesh], "collectives.").items()}
        if mesh in SHARDED:
            assert calls["collectives.all-gather"] > 0, mesh  # of fsdp's parameters
            assert calls["collectives.all-reduce"] + calls["collectives.reduce-scatter"] > 0, mesh
        else:
            assert set(calls.values()) == {0}, mesh
