"""The feed-forward network of factors: the kernel simulated against float64, and compiled for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.low_rank.feed_forward import GLUFactors, by_kernel, fits
from mesh import make_mesh
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

pytestmark = pytest.mark.numerics

TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def silu_times(gate: Any, up: Any) -> Any:
    return gate / (1 + jnp.exp(-gate)) * up


def arrays(tokens: int, width: int, units: int) -> tuple[Any, GLUFactors]:
    """Return activations and factors of three ranks, float64."""
    rng = np.random.default_rng(0)
    shapes = [(width, 24), (24, units), (width, 40), (40, units), (units, 16), (16, width)]
    factors = GLUFactors(*(rng.standard_normal(shape) * shape[0] ** -0.5 for shape in shapes))
    return rng.standard_normal((tokens, width)), factors


def by_xla(x: Any, factors: GLUFactors) -> Any:
    hidden = silu_times(x @ factors.gate_a @ factors.gate_b, x @ factors.up_a @ factors.up_b)
    return hidden @ factors.down_a @ factors.down_b


def expected(x: Any, factors: GLUFactors) -> Any:
    gate, up = x @ factors.gate_a @ factors.gate_b, x @ factors.up_a @ factors.up_b
    return gate / (1 + np.exp(-gate)) * up @ factors.down_a @ factors.down_b


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "units"), [(520, 384), pytest.param(512, 640, marks=pytest.mark.full)], ids=["one tile", "five tiles"]
)
def test_values_are_those_of_float64(tokens: int, units: int):
    """A last block that is not full; blocks of tokens, tiles of hidden units."""
    x, factors = arrays(tokens, 32, units)
    given = jnp.asarray(x, jnp.float32), GLUFactors(*(jnp.asarray(one, jnp.float32) for one in factors))
    assert fits(given[1], tokens)
    right = expected(*jax.tree.map(lambda one: np.asarray(one, np.float64), given))  # of the rounded ones
    found = by_kernel(*given, silu_times, interpret=True)
    np.testing.assert_allclose(found, right, atol=4e-6 * np.abs(right).max())


def test_what_the_kernel_does_not_take():
    _, factors = arrays(1, 32, 384)
    assert not fits(factors, 79)  # factors of 80 numbers for each hidden unit
    assert not fits(arrays(1, 32, 200)[1], 4096)  # units that are no multiple of 128
    wide = GLUFactors(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(8, 16384), (16384, 8192)] * 3))
    assert not fits(wide._replace(down_a=jax.ShapeDtypeStruct((8192, 16384), jnp.bfloat16)), 1 << 20)


def on_two_devices() -> list[list[float]]:
    x, factors = arrays(512, 32, 512)
    hidden = {1: (None, "tensor"), 3: (None, "tensor"), 4: ("tensor", None)}
    mesh = make_mesh({"tensor": 2})

    def place(one: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(jnp.asarray(one, jnp.float32), jax.NamedSharding(mesh, jax.P(*spec)))

    with jax.set_mesh(mesh):
        placed = GLUFactors(*(place(one, *hidden.get(index, ())) for index, one in enumerate(factors)))
        return np.asarray(
            jax.jit(lambda x, factors: by_kernel(x, factors, silu_times, interpret=True))(place(x), placed)
        ).tolist()


@pytest.mark.full
def test_hidden_units_may_be_on_several_devices():
    x, factors = arrays(512, 32, 512)
    np.testing.assert_allclose(elsewhere(on_two_devices, environ=TWO_DEVICES), expected(x, factors), atol=3e-6)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_hidden_units_are_not_in_memory(topology: str):
    """8,192 tokens x 4,096, 14,336 hidden units, rank 1,024: less than 0.3 of plain XLA."""
    found = elsewhere(compile_for_tpu, topology, environ=TPU_COMPILER)
    assert found["kernel"] <= 0.3 * found["xla"] and found["kernel"] < 0.3 * found["dense"]


def compile_for_tpu(topology: str) -> dict[str, int]:
    """Temporary bytes of the network on one device."""
    from jax.experimental import topologies

    mesh = make_mesh({}, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1])

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))

    width, units, rank = 4096, 14336, 1024
    wide, narrow = (array(width, rank), array(rank, units)), (array(units, rank), array(rank, width))
    x, matrices = array(8192, width), (array(width, units), array(width, units), array(units, width))

    def temporary(run: Any, *given: Any) -> int:
        memory = jax.jit(run).lower(x, *given).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    with jax.set_mesh(mesh):
        factors = GLUFactors(*wide, *wide, *narrow)
        return {
            "kernel": temporary(lambda x, factors: by_kernel(x, factors, silu_times), factors),
            "xla": temporary(by_xla, factors),
            "dense": temporary(lambda x, gate, up, down: silu_times(x @ gate, x @ up) @ down, *matrices),
        }
