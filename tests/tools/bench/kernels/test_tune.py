"""`axl bench block_sizes`: what is tried, read from the compiler, timed, written and refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from axlearn_like.kernels.paged_attention.block_sizes import BlockKey, load_table
from mesh import UserError, make_mesh
from mesh.topology import parse_topology, topology_devices
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler
from tools.bench.kernels import tune
from tools.bench.kernels.candidates import PHASES, Job, _compiled, candidates
from tools.bench.kernels.llo import kernel_code

CODE = """== CAPACTIY:
MXU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL
    2     3     3     2     2
== UTILIZATION:
0 1 0 0 2
1 0 3 0 0
1 0 1 0 1
"""
PROGRAM = '%attend.1 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"\n%fusion = f32[8] fusion(%x)'
V6E = SimpleNamespace(device_kind="TPU v6 lite")


def silent(_: str) -> None:
    pass


def test_bundles_and_spills_are_those_of_kernels_alone_and_dumps_are_deleted(tmp_path: Path):
    for name in ("1-attend.1-70-final", "1-attend.1-65-pre-delay", "2-fusion-70-final", "3-attend.12-70-final"):
        (tmp_path / f"{name}_hlo-static-per-bundle-utilization.txt").write_text(CODE)
    assert kernel_code(tmp_path, PROGRAM) == {"bundles": 3, "spills": 3, "fills": 4}
    assert not list(tmp_path.iterdir())


def test_candidates_begin_with_the_default_and_no_block_exceeds_a_row():
    for phase, grid in PHASES.items():
        found = candidates(phase, 1024)
        assert found[0][next(iter(grid))] == 512 and len(found) == len({tuple(one.items()) for one in found})
        assert all(one[next(iter(grid))] <= 1024 for one in found)


def test_the_fastest_sizes_become_an_entry_beside_those_of_other_shapes(tmp_path: Path):
    path = tmp_path / "table.json"
    slow, fast = (
        {"row_keys": 512, "row_queries": 8, "seconds": 2.0},
        {"row_keys": 256, "row_queries": 8, "seconds": 1.0},
    )
    phases = {"rows": [fast, slow], "chunks": [{"chunk_keys": 512, "chunk_queries": 64, "refused": "VMEM"}]}
    for heads in (8, 4):
        tune._write(path, Job(kv_heads=heads), V6E, {"row_keys": 256, "row_queries": 8}, phases)
    table = load_table(path)
    key = BlockKey("v6e", 8, 128, 16)
    assert table.sizes.keys() == {key, BlockKey("v6e", 4, 128, 16)}
    assert (table.sizes[key].row_keys, table.sizes[key].chunk_keys) == (256, 512)
    assert table.measured[key]["seconds"] == {"rows": {"best": 1.0, "default": 2.0}}


def test_what_has_no_times_here_writes_no_table(tmp_path: Path):
    with pytest.raises(UserError, match="expected no --topology and no --quick"):
        tune.check("v6e:2x2", tmp_path / "table.json", quick=False)
    with pytest.raises(UserError, match="no TPU .*--topology v6e:2x2 shows what the compiler says"):
        tune.check("", None, quick=False)


@pytest.mark.full
def test_candidates_are_tested_and_timed_in_simulation():
    result = tune.timed(tune.QUICK, 1, silent)
    assert result["best"] == {
        name: size for rows in result["phases"].values() for name, size in _sizes(rows[0]).items()
    }
    assert all(row["seconds"] > 0 for rows in result["phases"].values() for row in rows)


@pytest.mark.full
@needs_tpu_compiler
def test_without_a_chip_candidates_are_ordered_by_their_code_and_it_is_said_that_nothing_is_timed():
    result = tune.compiled("v6e:2x2", Job(rows=16, keys=128), silent)
    assert not result["timed"] and "no order of speed" in result["note"] and json.dumps(result)
    rows = result["phases"]["rows"]
    assert len(rows) == 4 and all(row["bundles"] > 0 for row in rows)
    assert [row["bundles_per_key"] for row in rows] == sorted(row["bundles_per_key"] for row in rows)


@pytest.mark.full
@needs_tpu_compiler
def test_what_mosaic_refuses_is_a_refused_candidate(tmp_path: Path):
    (tmp_path / "dump").write_text("")
    refused = elsewhere(compile_odd_rows, str(tmp_path), environ=TPU_COMPILER)["refused"]
    assert refused.startswith("MosaicError: ") and "Mosaic failed to compile" in refused
    assert not list(tmp_path.iterdir())


def compile_odd_rows(folder: str) -> dict[str, Any]:
    """Every third row of a block of bfloat16, which Mosaic does not load."""
    from jax.experimental import pallas as pl

    def kernel(x: Any, y: Any) -> None:
        y[...] = x[pl.ds(0, 5, stride=3)]

    def run(x: Any, y: Any) -> Any:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype))(x)

    mesh = make_mesh({}, topology_devices(parse_topology("v6e:2x2"))[:1])
    arrays = [jax.ShapeDtypeStruct((rows, 100), jnp.bfloat16) for rows in (16, 5)]
    return _compiled(run, arrays, jax.NamedSharding(mesh, jax.P()), Path(folder))


def _sizes(row: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in row.items() if name.endswith(("_keys", "_queries"))}
