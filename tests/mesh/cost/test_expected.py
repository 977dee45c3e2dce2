"""Figures of a run that layers state (`mesh.cost.expected`), counted in the traced and in the compiled program."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mesh.cost.arithmetic import products
from mesh.cost.expected import costs, turns
from mesh.cost.hlo import parse
from mesh.cost.traffic import operations

STEPS, LAYERS = 32, 3
# A decoding loop that may end early, in it a loop over layers: a kernel that is given the pool of all layers reads the
# pages of its rows, and another writes one page; shortened from libtpu's text.
DECODING = (Path(__file__).parent / "decoding.hlo").read_text()


def test_a_kernel_moves_what_its_layer_states_and_not_the_pool_of_all_layers():
    program = parse(DECODING)
    assert program.unknown_loops() == 0
    moved = {one.bytes: one.times for one in operations(program) if one.kernel}
    assert moved == {500: STEPS * LAYERS, 8000: STEPS * LAYERS}


def test_a_loop_of_which_nobody_knows_the_end_counts_once_and_is_reported():
    program = parse(DECODING.replace("turns_32_times/", ""))
    assert program.unknown_loops() == 1
    assert {one.times for one in operations(program) if one.kernel} == {LAYERS}


def double(x: jax.Array) -> jax.Array:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] @ x_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_traced_products_count_stated_turns_and_kernels():
    def run(x: jax.Array, end: jax.Array) -> jax.Array:
        with turns(STEPS):
            return jax.lax.while_loop(lambda x: x[0, 0] < end, body, x)

    def body(x: jax.Array) -> jax.Array:
        with costs(flops=77, bytes=5):
            y = double(x)
        return jax.lax.while_loop(lambda y: y[0, 0] < 0, lambda y: y @ y, y)  # within, but not the stated loop

    found = products(jax.make_jaxpr(run)(jnp.ones((8, 8)), jnp.ones(())))
    assert (found.xla, found.kernels) == (STEPS * 2 * 8**3, STEPS * 77)
    plain = products(jax.make_jaxpr(double)(jnp.ones((8, 8))))
    assert plain.kernels == 2 * 8**3
