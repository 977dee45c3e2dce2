"""Stacks of layers compiled for a TPU: what is stored, in which memory and type. Needs the compiler, no TPU."""

from typing import Any

import pytest

from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

pytestmark = [pytest.mark.full, needs_tpu_compiler]

LAYERS, DIM, HIDDEN, ROWS, LENGTH, DEVICES = 8, 256, 512, 4, 1024, 4


def compile_small() -> dict[str, Any]:
    """Return facts of the compiled gradient of a small decoder, fsdp over four chips, block inputs offloaded."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from axlearn_like.layers.base import split
    from axlearn_like.layers.feed_forward import SwiGLU
    from axlearn_like.training.losses import SupervisedLoss, make_supervised_loss
    from mesh import make_mesh, to_named_sharding
    from mesh.cost.ahead_of_time import compile_step
    from mesh.topology import parse_topology, topology_devices
    from tests.axlearn_like.layers.small import small_decoder

    topology = parse_topology("v5e:2x2")
    mesh = make_mesh({"fsdp": DEVICES}, devices=topology_devices(topology))
    ints = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32)

    cfg = small_decoder(num_layers=LAYERS, dim=DIM, vocab_size=512, dtype="bfloat16", remat="everything_offloaded")
    cfg.block.feed_forward = SwiGLU.Config(hidden=HIDDEN)
    graphdefs: list[Any] = []

    def init() -> Any:
        graphdef, params = split(cfg.build(rngs=nnx.Rngs(0)))
        graphdefs.append(graphdef)
        return params

    rows = jax.NamedSharding(mesh, jax.P("fsdp"))
    batch = {
        name: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype, sharding=rows)
        for name, dtype in {**ints, "weights": jnp.float32}.items()
    }

    def trace() -> Any:
        params = to_named_sharding(jax.eval_shape(init), mesh)
        loss = make_supervised_loss(graphdefs[0], SupervisedLoss.Config(chunks=2).build())
        return jax.jit(jax.grad(loss, has_aux=True)).trace(params, batch)

    compiled = compile_step("offloaded", trace, mesh, topology)
    assert compiled.memory is not None and compiled.executable is not None
    return {
        "host": compiled.memory.host,
        "casts": (compiled.executable.as_text() or "").count(f"bf16[{LAYERS},{DIM // DEVICES},{HIDDEN}]"),
    }


@pytest.fixture(scope="module")
def program():
    return elsewhere(compile_small, environ=TPU_COMPILER, timeout=600)


def test_what_is_offloaded_lies_on_the_host(program):
    inputs = LAYERS * ROWS * LENGTH * DIM * 2 // DEVICES  # of all blocks, in bfloat16
    assert inputs <= program["host"] < 1.1 * inputs


def test_no_copy_of_the_stack_is_kept_in_the_type_of_the_activations(program):
    assert program["casts"] == 0
