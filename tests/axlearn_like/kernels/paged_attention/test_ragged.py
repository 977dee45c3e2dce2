"""Ragged paged attention on TPU: what it computes (simulated on CPU), and that the TPU compiler takes it in place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.ragged import ragged_attention
from axlearn_like.kernels.paged_attention.rows import BlockSizes, PagedRows
from mesh import UserError, make_mesh
from tests.axlearn_like.kernels.paged_attention.cases import PAGE, Case, compiled_bytes
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

SIZES = BlockSizes(row_keys=8, row_queries=4, chunk_keys=8, chunk_queries=4)
CASES = {
    "decoding": Case([0, 5, 7, 16, 3, 1], [1, 1, 1, 1, 0, 1], 1),
    "chunks": Case([0, 3, 8, 4, 11], [9, 9, 4, 0, 2], 9),  # whole pages, parts, an idle row
    "narrow heads": Case([2, 0], [1, 1], 1, kv_heads=1, per_kv=2, head_dim=64),
    "window, cap, scale": Case([0, 5, 7], [4, 1, 4], 4, rules=ScoreRules(window=3, soft_cap=2.0, scale=0.1)),
    "bfloat16": Case([6, 0, 2], [5, 1, 0], 5, dtype="bfloat16"),
}


def run(case: Case) -> tuple[np.ndarray, np.ndarray]:
    return case.run(ragged_attention, sizes=SIZES)


EVERY_RUN = ("chunks", "window, cap, scale", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n not in EVERY_RUN)) for n in CASES])
def test_against_plain_attention_in_float64(name: str):
    CASES[name].check(*run(CASES[name]), tolerance=2e-5)


@pytest.mark.slow
def test_dead_tokens_are_zero_and_rows_do_not_depend_on_each_other():
    case = CASES["chunks"]
    mixed, _ = run(case)
    dead = np.arange(case.chunk) >= np.array(case.counts)[:, None]
    assert not mixed[dead].any()
    alone = dataclasses.replace(case)
    others = [0, 2, 3, 4]
    alone.counts = [0 if row in others else count for row, count in enumerate(case.counts)]
    np.testing.assert_array_equal(run(alone)[0][1], mixed[1])


@pytest.mark.full  # test_engine_mesh.py has an engine on two devices in every run
def test_heads_spread_over_devices_give_the_same():
    found = elsewhere(two_devices, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
    assert found == {"tensor": True, "data": True}


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize(("topology", "chunk"), [("v5p:2x2x1", 1), ("v6e:2x2", 1), ("v6e:2x2", 64)])
def test_tpu_compiler_updates_the_pool_in_place(topology: str, chunk: int):
    """Ahead of time, for chips that are not there: a scan over layers, heads over four devices."""
    found = elsewhere(compile_for_tpu, topology, str(chunk), environ=TPU_COMPILER)
    assert found["aliased"] == found["pool"]
    assert found["temporary"] < 0.05 * found["pool"]


def test_head_counts_that_the_kernel_cannot_lay_out_are_refused():
    with pytest.raises(UserError, match="3 key/value heads per device"):
        make_pool(1, 2, PAGE, kv_heads=3, head_dim=128)


def test_page_tables_that_do_not_fit_into_scalar_memory_are_refused():
    count, width = 256, 2048  # by the compiler's word: 64 rows fit, 128 do not
    shape = jax.ShapeDtypeStruct
    q, kv = shape((count, 1, 2, 2, 128), jnp.bfloat16), shape((count, 1, 2, 128), jnp.bfloat16)
    numbers: Any = [shape(x, jnp.int32) for x in ((count, width), (count,), (count,))]
    rows: Any = PagedRows(q, kv, kv, *numbers)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="256 rows x 2048 pages of 4 tokens"):
        jax.eval_shape(ragged_attention, rows, make_pool(1, 2, PAGE, 2, 128))


def two_devices() -> dict[str, bool]:
    """Mesh axis -> whether two devices along it compute what one does."""
    case = CASES["decoding"]
    expected = run(case)
    found = {}
    for axis in ("tensor", "data"):
        with jax.set_mesh(make_mesh({axis: 2})):
            found[axis] = all(map(np.array_equal, run(case), expected))
    return found


def compile_for_tpu(topology: str, chunk: str) -> dict[str, int]:
    """Bytes per device of eight layers, pages of 16 tokens."""
    shape: dict[str, Any] = {"queries": (16, int(chunk), 8, 5), "table": 64, "pages": 512}
    return compiled_bytes(ragged_attention, lambda pages: make_pool(1, pages, 16, 8, 128), topology, **shape)
