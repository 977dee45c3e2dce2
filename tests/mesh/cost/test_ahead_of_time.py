"""Programs whose communication is written out by hand, as the TPU compiler leaves it; and what does not fit.

The compiler runs in processes of its own: it can end a process.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mesh import MESH_AXES, make_mesh
from mesh.cost.ahead_of_time import compile_step, memory_per_device, read_shortage
from mesh.cost.collectives import by_axis, collectives
from mesh.topology import find_compiler, parse_topology, topology_devices
from tests.elsewhere import elsewhere

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the TPU compiler (libtpu) is not installed")
TURNS, ROWS, WIDTH = 3, 256, 512


@needs_compiler
@pytest.mark.parametrize(
    ("topology", "slices", "shape"),
    [
        pytest.param("v5p:2x2x1", 1, {"fsdp": 2, "tensor": 2}, marks=pytest.mark.full),
        ("v6e:2x2", 2, {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_every_collective_of_a_loop_is_found_with_its_axis_count_and_bytes(topology, slices, shape):
    found = elsewhere(communicate, topology, slices, shape)
    block = ROWS * WIDTH * 4  # float32; groups of two, so a half of what is whole is received
    wanted = {
        "fsdp": {
            "all-gather": {"count": TURNS, "bytes": TURNS * 2 * block // 2},
            "reduce-scatter": {"count": TURNS, "bytes": TURNS * 2 * block // 2},
        },
        "tensor": {
            "all-reduce": {"count": TURNS, "bytes": TURNS * 2 * block // 2},
            "collective-permute": {"count": TURNS, "bytes": TURNS * block},
        },
    }
    between = found["collectives"].pop("data between slices", {})
    assert found["collectives"] == wanted
    assert between == ({"all-reduce": {"count": 1, "bytes": 2 * block // 2}} if slices > 1 else {})
    assert found["unknown_loops"] == 0
    assert found["devices"] == 4 * slices
    assert found["available"] > found["peak"] > 0


@needs_compiler
def test_what_does_not_fit_is_a_verdict():
    found = elsewhere(overflow, "v6e:1x1")
    assert found["executable"] is False
    assert found["shortage"]["available"] == pytest.approx(31.25 * (1 << 30), rel=0.01)
    assert found["shortage"]["needed"] > 40 << 30
    assert "RESOURCE_EXHAUSTED" in found["shortage"]["message"]
    assert found["available"] == found["shortage"]["available"]


@needs_compiler
@pytest.mark.full  # three compilations, 18 CPU-seconds
def test_the_peak_is_what_the_compiler_compares_with_the_memory():
    """A step whose arrays together are more than the memory fits, as some temporaries lie where results will."""
    fits, refused = elsewhere(nearly_full, "v5e:1x1")
    assert fits["peak"] < fits["available"] < fits["sum"] - (256 << 20)
    assert refused["needed"] - refused["more"] == pytest.approx(fits["peak"], abs=16 << 20)  # said in 0.01 GiB


@needs_compiler
def test_an_option_that_the_compiler_does_not_know_is_named():
    assert "xla_tpu_no_such_option=1" in elsewhere(refuse_option, "v6e:1x1")


def test_a_refusal_is_read():
    first = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (306.00G) exceeds available HBM (95.73G). HLO module: jit_f."
    )
    shortage = read_shortage(f"{first}\nSee https://openxla.org")
    assert (shortage.what, shortage.needed, shortage.message) == ("HLO temporaries", 306 << 30, first)
    assert shortage.available == int(95.73 * (1 << 30))
    assert read_shortage("RESOURCE_EXHAUSTED: of another kind").needed == 0


def communicate(topology: str, slices: int, shape: dict[str, int]) -> dict[str, Any]:
    """Loop of a gather over fsdp, a sum and a shift over tensor and a scatter over fsdp; then a sum over data."""
    found = parse_topology(topology, slices)
    mesh = make_mesh(shape, topology_devices(found))

    def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        whole = jax.lax.all_gather(x, "fsdp", tiled=True)  # [2 rows, width]
        x = jax.lax.psum(jnp.sin(x), "tensor") + jax.lax.ppermute(jnp.cos(x), "tensor", [(0, 1), (1, 0)])
        x = x + jax.lax.psum_scatter(jnp.tanh(whole) * x[0], "fsdp", tiled=True)
        return jnp.sin(x), None

    def body(x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(turn, x, None, length=TURNS)
        return jax.lax.psum(x, "data")

    step = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=jax.P(MESH_AXES), out_specs=jax.P(MESH_AXES), check_vma=False)
    )
    rows = jax.ShapeDtypeStruct(
        (ROWS * mesh.devices.size, WIDTH), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(MESH_AXES))
    )
    compiled = compile_step("communicate", lambda: step.trace(rows), mesh, found)
    assert compiled.hlo is not None and compiled.memory is not None
    sent = collectives(compiled.hlo, mesh)
    table = by_axis(sent, [0.0] * len(sent))
    return {
        "collectives": {
            axis: {kind: {name: row[name] for name in ("count", "bytes")} for kind, row in kinds.items()}
            for axis, kinds in table.items()
        },
        "unknown_loops": compiled.hlo.unknown_loops(),
        "devices": mesh.devices.size,
        "available": compiled.memory.available,
        "peak": compiled.memory.peak,
    }


def overflow(topology: str) -> dict[str, Any]:
    found = parse_topology(topology)
    mesh = make_mesh({}, topology_devices(found))
    rows = jax.ShapeDtypeStruct((1 << 16, 1 << 17), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P()))
    step = jax.jit(lambda x: jnp.sort(x, axis=0) @ jnp.sort(x, axis=1).T)
    compiled = compile_step("overflow", lambda: step.trace(rows), mesh, found)
    assert compiled.shortage is not None
    return {
        "executable": compiled.executable is not None,
        "shortage": vars(compiled.shortage),
        "available": memory_per_device(found),
    }


def nearly_full(topology: str) -> tuple[dict[str, int], dict[str, int]]:
    """A step of gradient descent beside an array that leaves it 0.1 GiB; and beside one of 1 GiB more."""
    found = parse_topology(topology)
    mesh = make_mesh({}, topology_devices(found))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, params)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params: Any, x: jax.Array, beside: jax.Array) -> Any:
        descended = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))
        return descended, jnp.sum(beside[:8])

    params = (array(8, 2048, 8192), array(8, 8192, 2048))

    def compiled(beside: int) -> Any:
        arrays = (params, array(16_384, 2048), array(beside // 2048, 1024))
        return compile_step("step", lambda: step.trace(*arrays), mesh, found)

    alone = compiled(1 << 20).memory
    assert alone is not None
    beside = alone.available - alone.peak - (100 << 20)
    fitting = compiled(beside)
    plan = fitting.memory
    assert plan is not None and fitting.shortage is None
    shortage = compiled(beside + (1 << 30)).shortage
    assert shortage is not None
    whole = plan.arguments + plan.temp + plan.output - plan.alias
    fits = {"peak": plan.peak, "available": plan.available, "sum": whole}
    return fits, {"needed": shortage.needed, "more": 1 << 30}


def refuse_option(topology: str) -> str:
    from mesh import UserError

    found = parse_topology(topology)
    mesh = make_mesh({}, topology_devices(found))
    one = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P()))
    step = jax.jit(lambda x: x + 1)
    try:
        compile_step("refused", lambda: step.trace(one), mesh, found, {"xla_tpu_no_such_option": "1"})
    except UserError as error:
        return str(error)
    return "taken"
