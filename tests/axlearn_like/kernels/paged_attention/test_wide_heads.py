"""Heads wider than a register (Gemma 3 has 256 numbers): several on a page go to kernels that read them in parts."""

from typing import Any

import jax.numpy as jnp
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.int8 import make_int8_kernel_pool
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.rows import PagedRows, has_wide_heads
from tests.axlearn_like.kernels.paged_attention.cases import Case, compiled_bytes
from tests.axlearn_like.kernels.paged_attention.values import int8_paged, paged
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

WINDOW = ScoreRules(window=3, soft_cap=2.0, scale=0.1)


def attend(rows: PagedRows, pool: Any, *, rules: ScoreRules, interpret: bool) -> tuple[Any, Any]:
    return PagedKernel.Config(interpret=interpret).build().attend(rows, pool, rules=rules, sinks=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_against_plain_attention_in_float64(dtype: str):
    case = Case([2, 0, 7], [1, 1, 1], 1, kv_heads=2, per_kv=2, head_dim=256, dtype=dtype)
    case.check(*case.run(attend), tolerance=2e-5)


@pytest.mark.slow
def test_chunks_with_window_and_cap():
    case = Case([2, 0, 7], [9, 4, 0], 9, kv_heads=4, per_kv=2, head_dim=256, dtype="bfloat16", rules=WINDOW)
    case.check(*case.run(attend), tolerance=2e-5)


@pytest.mark.slow
def test_pages_of_int8_and_pages_in_common():
    shape: dict[str, Any] = {"lengths": [11, 19, 16], "heads": 2, "width": 256}
    for found, right in [*int8_paged(**shape), *paged(**shape, shared=8)]:
        assert abs(found - right).max() < 2e-5


def test_jax_kernel_reads_the_others():
    assert has_wide_heads(make_pool(1, 2, 4, 2, 256))
    assert not has_wide_heads(make_pool(1, 2, 4, 1, 256))
    assert not has_wide_heads(make_pool(1, 2, 4, 2, 128, jnp.float32))


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("chunk", [1, 64])
def test_the_tpu_compiler_takes_them_in_place(chunk: int):
    """JAX's kernel is refused: "the last dim size is not 128"."""
    for found in elsewhere(compile_for_tpu, str(chunk), environ=TPU_COMPILER):
        assert found["aliased"] == found["pool"]
        assert found["temporary"] < 0.05 * found["pool"]


def compile_for_tpu(chunk: str) -> list[dict[str, int]]:
    """Return bytes of a device, with four heads on each: pages of bfloat16, and of int8."""
    shape: dict[str, Any] = {"queries": (16, int(chunk), 16, 2), "table": 64, "pages": 128, "width": 256}
    pools = [make_pool, make_int8_kernel_pool]

    def run(rows: PagedRows, pool: Any) -> Any:
        return attend(rows, pool, rules=ScoreRules(window=1024), interpret=False)

    return [compiled_bytes(run, lambda n, make=make: make(1, n, 64, 16, 256), "v6e:2x2", **shape) for make in pools]
