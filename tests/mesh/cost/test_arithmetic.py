"""Counted matrix products against those written down by hand."""

from typing import Any

import jax
import jax.numpy as jnp

from mesh.cost.arithmetic import products
from mesh.cost.expected import filled, turns
from mesh.cost.traced_buffers import kept_for_backward, largest_traced


def count(function: Any, *shapes: tuple[int, ...]) -> float:
    return products(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))).total


def stack(x: jax.Array, w: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.sum(jax.lax.scan(body, x, w)[0])


def test_products_of_all_shapes():
    assert count(lambda a, b: a @ b, (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    assert count(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (7, 3, 4), (7, 5, 4)) == 2 * 7 * 3 * 4 * 5
    assert count(lambda a, b: jax.jit(jnp.matmul)(a, b) + 1, (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    groups = jnp.array([2, 1], jnp.int32)
    assert count(lambda a, b: jax.lax.ragged_dot(a, b, groups), (3, 4), (2, 4, 5)) == 2 * 3 * 4 * 5


def test_loops_branches_and_recomputation():
    assert count(stack, (8, 16), (5, 16, 16)) == 5 * 2 * 8 * 16 * 16
    # The gradient: forward, forward again for the checkpoint, and two products backward.
    assert count(jax.grad(stack, argnums=(0, 1)), (8, 16), (5, 16, 16)) == 4 * 5 * 2 * 8 * 16 * 16

    def either(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.cond(a[0, 0] > 0, lambda: a @ b @ b, lambda: a @ b)

    assert count(either, (4, 4), (4, 4)) == 2 * 2 * 4**3


def test_what_a_loop_keeps_for_the_backward_pass():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (5, 16, 16))]
    jaxpr = jax.make_jaxpr(jax.grad(stack))(*shapes)
    kept = 5 * 8 * 16 * 4  # the input of each turn
    assert kept_for_backward(jaxpr) in (kept, 2 * kept)  # jax may keep one array under two names
    largest = largest_traced(jaxpr)
    assert largest[0].bytes >= kept and "test_arithmetic.py" in largest[0].source
    assert [one.bytes for one in largest] == sorted((one.bytes for one in largest), reverse=True)


def test_a_shard_map_counts_for_all_its_devices():
    axis, mesh = "fsdp", jax.sharding.AbstractMesh((3,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        spread = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(jax.P(axis), jax.P()), out_specs=jax.P(axis))
        return spread(jax.reshard(a, jax.P(axis)), b)

    with jax.sharding.use_abstract_mesh(mesh):
        assert count(product, (6, 4), (4, 5)) == 2 * 6 * 4 * 5


def test_arrays_inside_a_shard_map_are_those_of_one_device():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.sharding.AbstractMesh((2, 4), ("expert", "tensor"), axis_types=explicit)

    def doubled(x: jax.Array) -> jax.Array:
        rows = jax.P("expert")
        double = jax.shard_map(lambda x: 2 * x, in_specs=rows, out_specs=rows, axis_names={"expert"})
        return double(jax.reshard(x, jax.P("expert", "tensor")))

    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(doubled)(jax.ShapeDtypeStruct((6, 8), jnp.float32))
    assert {one.array for one in largest_traced(jaxpr) if one.operation == "mul"} == {"float32[3,2]"}


def test_ragged_products_count_the_rows_that_are_expected():
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        with filled(4):
            y = jax.checkpoint(lambda a: jax.lax.ragged_dot(a, b, jnp.array([2, 1], jnp.int32)))(a)
        return jnp.sum(y**2)

    places = 2 * 8 * 4 * 5
    assert count(product, (8, 4), (2, 4, 5)) == places / 4
    assert count(jax.grad(product, argnums=(0, 1)), (8, 4), (2, 4, 5)) == 3 * places / 4  # forward, and two backward


def test_a_loop_that_is_not_expected_to_turn_counts_nothing():
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        with turns(0):
            return jax.lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x @ b, a)

    assert count(product, (4, 4), (4, 4)) == 0


def test_arrays_that_the_compiler_spreads_are_not_said_to_be_whole():
    axis = "fsdp"
    mesh = jax.sharding.AbstractMesh((4,), (axis,), axis_types=(jax.sharding.AxisType.Explicit,))

    def look_up(table: jax.Array, rows: jax.Array) -> jax.Array:
        table = jax.reshard(table, jax.P(None, axis))
        return table.at[rows].get(out_sharding=jax.P(None, axis))

    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(look_up)(
            jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
        )
    assert largest_traced(jaxpr)[0].array == "float32[4096,4]"
