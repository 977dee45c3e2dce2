"""`axl bench block_sizes`: what is tried, timed, written and refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axlearn_like.kernels.paged_attention.block_sizes import BlockKey, load_table
from mesh import UserError
from tools.bench.kernels import tune
from tools.bench.kernels.candidates import PHASES, Job, candidates

V6E = SimpleNamespace(device_kind="TPU v6 lite")


def silent(_: str) -> None:
    pass


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
    with pytest.raises(UserError, match="expected no --quick"):
        tune.check(tmp_path / "table.json", quick=True)
    with pytest.raises(UserError, match="has no TPU .*or with --quick in simulation"):
        tune.check(None, quick=False)


@pytest.mark.full
def test_candidates_are_tested_and_timed_in_simulation():
    result = tune.timed(tune.QUICK, 1, silent)
    assert result["best"] == {
        name: size for rows in result["phases"].values() for name, size in _sizes(rows[0]).items()
    }
    assert all(row["seconds"] > 0 for rows in result["phases"].values() for row in rows)


def _sizes(row: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in row.items() if name.endswith(("_keys", "_queries"))}
