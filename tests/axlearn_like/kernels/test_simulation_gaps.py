"""Kernels that a simulation of TPUs cannot run: each test fails when a later jax or tokamax can, so that it is noticed.

JAX has two simulations. The plain one (`interpret=True`) runs our kernels and JAX's paged attention, and checks their
values. That with simulated memories (`InterpretParams`), which also finds races and reads of what nobody has written,
lacks transforms of references that they use. Neither runs tokamax's batched paged attention.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.block_sizes import BlockSizes
from axlearn_like.kernels.paged_attention.cascade import cascade_attention
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.ragged import ragged_attention
from axlearn_like.kernels.paged_attention.rows import PagedRows, SharedTiles
from axlearn_like.kernels.quantised_matmul import quantised_dot

ROWS, PAGE, HEADS, WIDTH = 2, 8, 2, 128
MEMORIES = pltpu.InterpretParams()
needs_tokamax = pytest.mark.skipif(find_spec("tokamax") is None, reason="tokamax is not installed")


def arguments() -> tuple[PagedRows, jax.Array]:
    """Return one token of two rows of 12 keys."""
    q = jnp.ones((ROWS, 1, HEADS, 2, WIDTH), jnp.bfloat16)
    k = jnp.ones((ROWS, 1, HEADS, WIDTH), jnp.bfloat16)
    table = 1 + jnp.arange(ROWS * 2, dtype=jnp.int32).reshape(ROWS, 2)
    rows = PagedRows(q, k, k, table, jnp.full(ROWS, 11, jnp.int32), jnp.ones(ROWS, jnp.int32))
    return rows, make_pool(1, 1 + ROWS * 2, PAGE, HEADS, WIDTH)


@pytest.mark.full
@pytest.mark.xfail(strict=True, reason="simulated memories lack reshaped views of references (jax 0.12.0.1)")
def test_paged_attention_with_simulated_memories():
    with pltpu.force_tpu_interpret_mode(MEMORIES):
        jax.block_until_ready(ragged_attention(*arguments()))


@pytest.mark.full
@pytest.mark.xfail(strict=True, reason="simulated memories lack bitcast views of references (jax 0.12.0.1)")
def test_cascade_attention_with_simulated_memories():
    tiles = SharedTiles(jnp.full(1, PAGE, jnp.int32), jnp.zeros(1, jnp.int32), 2)
    with pltpu.force_tpu_interpret_mode(MEMORIES):
        jax.block_until_ready(cascade_attention(*arguments(), tiles, rules=ScoreRules()))


@pytest.mark.full
@needs_tokamax
@pytest.mark.parametrize("mode", [True, MEMORIES])
@pytest.mark.xfail(strict=True, reason="no simulation has its transforms of references (jax 0.12.0.1, tokamax 0.0.17)")
def test_batched_paged_attention(mode: Literal[True] | pltpu.InterpretParams, monkeypatch: pytest.MonkeyPatch):
    from axlearn_like.kernels.paged_attention.batched import batched_attention

    chip = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1)
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: chip)  # the kernel asks for the chip that it runs on
    sizes = BlockSizes(row_keys=16, chunk_keys=16, row_queries=2, chunk_queries=16)
    with pltpu.force_tpu_interpret_mode(mode):  # pyright: ignore[reportArgumentType]
        jax.block_until_ready(batched_attention(*arguments(), rules=ScoreRules(), sinks=False, sizes=sizes))


@pytest.mark.full
@needs_tokamax
@pytest.mark.parametrize("mode", [True, MEMORIES])
@pytest.mark.xfail(strict=True, reason="no simulation has its loops over memories (jax 0.12.0.1, tokamax 0.0.17)")
def test_grouped_products_of_the_second_version(mode: Literal[True] | pltpu.InterpretParams):
    """The first version runs, on a chip that is described: a case of test_values.py."""
    tokamax = import_module("tokamax")
    chip = jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    x, w, sizes = np.ones((256, 128), np.float32), np.ones((4, 128, 128), np.float32), np.array([64, 0, 128, 64])
    with jax.sharding.use_abstract_mesh(mesh), pltpu.force_tpu_interpret_mode(mode):  # pyright: ignore[reportArgumentType]
        product = jax.jit(partial(tokamax.ragged_dot, implementation="mosaic_tpu_v2"))
        jax.block_until_ready(product(x, w, sizes.astype(np.int32)))


@pytest.mark.xfail(strict=True, reason="XLA for CPUs has no products of int4 that are summed in int32 (jax 0.12.0.1)")
def test_int4_products():
    x, w = jnp.ones((5, 80)), jnp.ones((80, 24))
    jax.block_until_ready(quantised_dot(x, w, "int4", None, None))
