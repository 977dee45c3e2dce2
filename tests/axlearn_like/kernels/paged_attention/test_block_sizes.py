"""The table of block sizes: what is found, written, overridden and refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axlearn_like.kernels.paged_attention.block_sizes import BlockKey, BlockSizes, BlockTable, load_table
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from mesh import UserError

KEY = BlockKey("v6e", 8, 128, 16)
FOUND = BlockSizes(row_keys=1024, chunk_queries=128, vmem_mib=64)
V6E, V5P = SimpleNamespace(device_kind="TPU v6 lite"), SimpleNamespace(device_kind="TPU v5")
SHAPE: dict[str, Any] = {"kv_heads": 8, "head_dim": 80, "page_size": 16}


def test_without_an_entry_sizes_are_those_that_were_constants():
    sizes, source = load_table().find(BlockKey("v5p", 8, 128, 16))
    assert (sizes.row_keys, sizes.row_queries, sizes.chunk_keys, sizes.chunk_queries) == (512, 8, 512, 64)
    assert (sizes.shared_keys, sizes.vmem_bytes, source) == (512, None, "default")


def test_the_tables_of_the_package_name_what_they_were_measured_on():
    table = load_table()
    assert all(table.measured[key].keys() >= {"device", "jax", "libtpu", "date"} for key in table.sizes)


def test_a_kernel_takes_the_entry_of_its_chip_and_shape_and_a_config_goes_first(tmp_path: Path):
    path = tmp_path / "table.json"
    BlockTable().with_entry(KEY, FOUND, {"device": "TPU v6 lite"}).write(path)
    assert load_table(path).sizes == {KEY: FOUND}
    cfg = PagedKernel.Config(table=str(path))
    kernel = cfg.build(device=V6E, **SHAPE)
    assert (kernel.sizes, kernel.source) == (FOUND, "table")
    assert (
        cfg.build(device=V5P, **SHAPE).sizes == cfg.build(device=V6E, **{**SHAPE, "kv_heads": 4}).sizes == BlockSizes()
    )
    own = cfg.clone(row_keys=256).build(device=V6E, **SHAPE)
    assert (own.sizes.row_keys, own.sizes.chunk_queries, own.described()["own"]) == (256, 128, ("row_keys",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": {"row_key": 8}}, r"entries\[0\]: sizes: no field 'row_key'.*row_keys"),
        ({"page_size": "16"}, r"page_size='16': expected int"),
        ({"heads": 3}, r"entries\[0\]: no field 'heads'"),
    ],
)
def test_a_damaged_table_is_refused_by_its_entry_and_field(tmp_path: Path, change: dict[str, Any], message: str):
    path = tmp_path / "table.json"
    BlockTable().with_entry(KEY, FOUND, {}).write(path)
    table = json.loads(path.read_text())
    table["entries"][0] |= change
    path.write_text(json.dumps(table))
    with pytest.raises(UserError, match=message):
        load_table(path)


def test_a_table_that_is_not_there_and_sizes_below_1_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no table of block sizes at .*axl bench block_sizes --table"):
        load_table(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UserError, match='expected {"entries"'):
        load_table(tmp_path / "other.json")
    with pytest.raises(UserError, match="row_keys=0; expected a whole number, 1 or more"):
        BlockSizes(row_keys=0)
    with pytest.raises(UserError, match="row_keys"):
        PagedKernel.Config(row_keys=0).build(device=V6E, **SHAPE)
