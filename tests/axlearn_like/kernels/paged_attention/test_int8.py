"""Paged attention over int8 on TPU: what it computes (simulated on CPU), and that the TPU compiler takes it."""

from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.int8_heads import restore, round_heads
from axlearn_like.kernels.paged_attention.int8 import int8_attention, make_int8_kernel_pool
from axlearn_like.kernels.paged_attention.rows import BlockSizes
from mesh import UserError
from tests.axlearn_like.kernels.paged_attention.cases import PAGE, Case, compiled_bytes, put_lines
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

SIZES = BlockSizes(row_keys=2 * PAGE, chunk_keys=2 * PAGE)


class Int8Case(Case):
    """A case whose pages hold int8 numbers, and scales."""

    @override
    def empty_pool(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        empty = make_int8_kernel_pool(2, self.pages, PAGE, self.kv_heads, self.head_dim)
        numbers = rng.integers(-127, 128, empty["numbers"].shape).astype(np.int8)  # of other sequences, to be ignored
        return {"numbers": numbers, "scales": np.full(empty["scales"].shape, np.nan, np.float32)}

    @override
    def put(self, pool: dict[str, np.ndarray], row: int, tokens: range) -> None:
        k, v = (jax.tree.map(np.asarray, round_heads(jnp.asarray(x[row]))) for x in (self.k, self.v))
        put_lines(pool["numbers"], self.table[row], tokens, k.numbers, v.numbers)
        for position in tokens:
            scales, slot = pool["scales"][self.table[row, position // PAGE]], position % PAGE
            scales[:, slot], scales[:, PAGE + slot] = k.scales[position, :, 0], v.scales[position, :, 0]

    @override
    def held(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(restore(*round_heads(jnp.asarray(x)), "float32"))


CASES = {
    "decoding": Int8Case([0, 5, 7, 16, 3, 1], [1, 1, 1, 1, 0, 1], 1),
    "chunks": Int8Case([0, 3, 8, 4, 11], [9, 9, 4, 0, 2], 9),  # whole pages, parts, an idle row; three items a row
    "narrow heads": Int8Case([2, 0], [1, 1], 1, kv_heads=4, per_kv=2, head_dim=64),
    "window, cap, scale": Int8Case([0, 5, 7, 13], [4, 1, 4, 4], 4, rules=ScoreRules(window=3, soft_cap=2.0, scale=0.1)),
    "bfloat16": Int8Case([6, 0, 2], [5, 1, 0], 5, dtype="bfloat16"),
}
DEFAULT = ("chunks",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] * (one not in DEFAULT)) for one in CASES])
def test_against_attention_to_the_rounded_keys_and_values_in_float64(name: str):
    case = CASES[name]
    case.check(*case.run(int8_attention, sizes=SIZES, queries_per_item=12), tolerance=2e-6)


def test_head_counts_that_the_kernel_cannot_lay_out_are_refused():
    with pytest.raises(UserError, match=r"1 key/value heads per device in int8; expected 2, 4, 8"):
        make_int8_kernel_pool(1, 2, PAGE, kv_heads=1, head_dim=128)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize(("topology", "chunk"), [("v5p:2x2x1", 1), ("v6e:2x2", 1), ("v6e:2x2", 256), ("v5e:2x2", 1)])
def test_tpu_compiler_updates_the_pool_in_place(topology: str, chunk: int):
    """Ahead of time, for chips that are not there: a scan over layers, heads over four devices."""
    found = elsewhere(compile_for_tpu, topology, str(chunk), environ=TPU_COMPILER)
    assert found["aliased"] == found["pool"] < 0.52 * found["bfloat16"]
    assert found["temporary"] < 0.1 * found["pool"]


def compile_for_tpu(topology: str, chunk: str) -> dict[str, int]:
    """Bytes per device of eight layers of 512 pages, and those of their tokens in bfloat16."""
    shape: dict[str, Any] = {"queries": (16, int(chunk), 8, 4), "table": 32, "pages": 512}
    found = compiled_bytes(int8_attention, lambda pages: make_int8_kernel_pool(1, pages, 64, 8, 128), topology, **shape)
    return found | {"bfloat16": 8 * 512 * 64 * 2 * 8 * 128 * 2 // 4}
