"""A loop over several updates gives each the bits of its program alone; frozen arrays go in once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.training.updates.programs import ProgramCall, StepProgram, run_calls, run_together
from mesh import make_mesh

WIDTH = 4


def function(changed: Any, given: Any) -> tuple[Any, Any]:
    """A step of gradient descent of factors a, b beside a frozen matrix."""

    def loss(factors: Any) -> tuple[jax.Array, jax.Array]:
        x = given["rows"]
        y = jnp.tanh(x @ given["held"]["w"] + x @ factors["a"] @ factors["b"])
        return jnp.sum(y * y), y

    (found, y), grads = jax.value_and_grad(loss, has_aux=True)(changed["factors"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, changed["moments"], grads)
    factors = jax.tree.map(lambda p, m: p - given["rate"] * m, changed["factors"], moments)
    return {"factors": factors, "moments": moments}, {"loss": found, "by_unit": jnp.sum(y, axis=0)}


def call(seed: int, program: Any, held: Any) -> ProgramCall:
    rng = np.random.default_rng(seed)
    factors = {"a": jnp.float32(rng.normal(size=(32, 2))), "b": jnp.float32(rng.normal(size=(2, 48)))}
    moments = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), factors)
    given = {"held": held, "rows": jnp.float32(rng.normal(size=(24, 32))), "rate": jnp.float32(1e-2 * seed)}
    return ProgramCall(program, {"factors": factors, "moments": moments}, given)


@pytest.fixture(scope="module")
def held() -> Any:
    return {"w": jnp.float32(np.random.default_rng(0).normal(size=(32, 48)))}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, WIDTH])
def test_each_has_the_bits_that_it_has_alone(held: Any, count: int):
    program = StepProgram(function)
    together = run_together([call(n, program, held) for n in range(1, 1 + count)], program.of_several(WIDTH), WIDTH)
    assert len(together) == count
    for number, found in enumerate(together, 1):
        (alone,) = run_together([call(number, program, held)], program.of_several(2), 2)
        jax.tree.map(np.testing.assert_array_equal, found, alone)
    assert len({float(found["loss"]) for _, found in together}) == count


@pytest.mark.slow
@pytest.mark.numerics
def test_results_are_those_of_the_program_without_a_loop(held: Any):
    program = StepProgram(function)
    calls = [call(seed, program, held) for seed in range(1, 1 + WIDTH)]
    expected_of_each = [program(jax.tree.map(jnp.copy, one.changed), one.given) for one in calls]
    together = run_together(calls, program.of_several(WIDTH), WIDTH)
    for expected, found in zip(expected_of_each, together, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected)


def test_states_are_replaced_in_their_memory(held: Any):
    """Beside them there is one stack of them at a time, as the check of memory counts."""
    program = StepProgram(function)
    calls = [call(seed, program, held) for seed in range(1, WIDTH)]
    before = [leaf for one in calls for leaf in jax.tree.leaves(one.changed)]
    run_together(calls, program.of_several(WIDTH), WIDTH)
    assert all(leaf.is_deleted() for leaf in before) and not held["w"].is_deleted()


def test_one_program_for_all_counts(held: Any):
    program = StepProgram(function)
    for count in range(1, 1 + WIDTH):
        run_together([call(seed, program, held) for seed in range(count)], program.of_several(WIDTH), WIDTH)
    assert program.of_several(WIDTH)._cache_size() == 1


def test_sharded_arrays_keep_their_shardings():
    mesh = make_mesh({"fsdp": -1})
    program = StepProgram(lambda changed, given: ({"p": changed["p"] * given["by"]}, {"first": changed["p"][:, 0]}))
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    with jax.set_mesh(mesh):
        every = [jax.device_put(jnp.full((4, 8 * mesh.size), float(n)), sharding) for n in range(3)]
        calls = [ProgramCall(program, {"p": p}, {"held": {}, "by": jnp.float32(2)}) for p in every]
        together = run_together(calls, program.of_several(WIDTH), WIDTH)
    for number, (changed, found) in enumerate(together):
        assert changed["p"].sharding == sharding
        np.testing.assert_array_equal(changed["p"], np.full((4, 8 * mesh.size), 2.0 * number))
        np.testing.assert_array_equal(found["first"], np.full(4, float(number)))


def test_calls_go_together_if_shapes_are_equal_and_frozen_arrays_the_same(held: Any):
    program = StepProgram(function)
    one = call(1, program, held)
    assert one.shape == call(2, program, dict(held)).shape
    copied = call(2, program, jax.tree.map(jnp.copy, held))
    assert one.shape != copied.shape, "equal arrays that are not the same: another base"
    shorter = one._replace(given={**one.given, "rows": one.given["rows"][:8]})
    assert one.shape != shorter.shape


def test_calls_of_an_update_are_run_in_turn():
    def calls() -> Any:
        first = yield ProgramCall(lambda changed, given: (changed + given, None), 1, 2)
        second = yield ProgramCall(lambda changed, given: (changed * given, None), first[0], 5)
        return {"step": second[0]}, {"loss": first[0]}

    assert run_calls(calls()) == ({"step": 15}, {"loss": 3})
