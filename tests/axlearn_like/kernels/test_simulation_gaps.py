"""Kernels that a simulation of TPUs cannot run: each test fails when a later jax can, so that it is noticed.

JAX has two simulations. The plain one (`interpret=True`) runs our kernels and JAX's paged attention, and checks their
values. That with simulated memories (`InterpretParams`), which also finds races and reads of what nobody has written,
lacks transforms of references that they use.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.cascade import cascade_attention
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.ragged import ragged_attention
from axlearn_like.kernels.paged_attention.rows import PagedRows, SharedTiles
from axlearn_like.kernels.quantised_matmul import quantised_dot

ROWS, PAGE, HEADS, WIDTH = 2, 8, 2, 128
MEMORIES = pltpu.InterpretParams()


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


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="XLA for CPUs has no products of int4 that are summed in int32 (jax 0.12.0.1)")
def test_int4_products():
    x, w = jnp.ones((5, 80)), jnp.ones((80, 24))
    jax.block_until_ready(quantised_dot(x, w, "int4", None, None))
