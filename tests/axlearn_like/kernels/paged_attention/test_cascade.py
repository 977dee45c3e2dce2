"""Cascade attention on TPU: what it computes (simulated on CPU), and that the TPU compiler takes it in place."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import MASKED, ScoreRules
from axlearn_like.kernels.paged_attention.cascade import cascade_attention, merge
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.rows import BlockSizes, PagedRows, SharedTiles
from tests.axlearn_like.kernels.paged_attention.cases import PAGE, Case, compiled_bytes
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

TILE = 3
ROWS: dict[str, Any] = {
    "starts": [18, 15, 22, 0, 8, 0, 11],
    "counts": [1, 1, 1, 1, 1, 0, 1],
    "chunk": 1,
    "shared": [16, 0, 8],  # of three tiles; the last has one row
    "tile": TILE,
}
CAP = ScoreRules(soft_cap=2.0, scale=0.3)
CASES = {
    "float32": Case(**ROWS),
    "bfloat16, one head of keys": Case(**ROWS, kv_heads=1, per_kv=2, dtype="bfloat16"),
    "narrow, cap, scale": Case(**ROWS, per_kv=1, head_dim=64, rules=CAP),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] * (one != "float32")) for one in CASES])
@pytest.mark.parametrize("pages", [1, pytest.param(100, marks=pytest.mark.full)])  # of a block
def test_against_plain_attention_in_float64(name: str, pages: int):
    case = CASES[name]
    tiles = SharedTiles(np.array(case.shared, np.int32), np.array([0, 3, 6], np.int32), TILE)
    case.check(*case.run(cascade_attention, tiles=tiles, sizes=BlockSizes(shared_keys=pages * PAGE)), tolerance=2e-5)


@pytest.mark.slow
def test_parts_without_keys_have_no_weight():
    mixed, sums = jnp.ones((1, 2, 4)), jnp.full((1, 2, 128), 3.0)
    empty = jnp.zeros_like(mixed), jnp.full_like(sums, MASKED)
    np.testing.assert_array_equal(merge([empty, (mixed, sums)]), mixed)
    np.testing.assert_array_equal(merge([empty, empty]), empty[0])


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_tpu_compiler_updates_the_pool_in_place(topology: str):
    found = elsewhere(compile_for_tpu, topology, environ=TPU_COMPILER)
    assert found["aliased"] == found["pool"]
    assert found["temporary"] < 0.05 * found["pool"]


def compile_for_tpu(topology: str) -> dict[str, int]:
    """Bytes per device: 64 rows in tiles of 16, 8,192 keys each, heads of Qwen3-8B over four devices."""
    shape: dict[str, Any] = {"queries": (64, 1, 8, 4), "table": 512, "pages": 4096, "layers": 4, "tiles": 4}

    def run(rows: PagedRows, pool: Any, shared: Any, sources: Any) -> Any:
        return cascade_attention(rows, pool, SharedTiles(shared, sources, 16), rules=ScoreRules())

    return compiled_bytes(run, lambda pages: make_pool(1, pages, 16, 8, 128), topology, **shape)
