"""Programs for devices that are only described."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from axlearn_like.kernels.attention.dispatch import AttentionParams, attend
from axlearn_like.kernels.attention.interface import ScoreRules
from mesh import make_mesh
from mesh.rules import partition


def gradient_program(
    devices: Sequence[Any], shape: dict[str, int], kernel: Any, sequence: Any, *, length: int = 4096
) -> dict[str, int]:
    """The gradient of attention, compiled: temporary bytes of a device, kernel calls, and collectives."""
    mesh = make_mesh(shape, devices)
    attention = AttentionParams(ScoreRules(), kernel.build(), sequence.build())
    rows = ("batch", "length", "heads")
    with jax.set_mesh(mesh):

        def array(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
            spec = partition(*rows[: len(sizes)], *[None] * (len(sizes) - 3))
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec or jax.P()))

        def loss(q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
            layout = "zigzag" if shape else "straight"
            mixed = attend(q, k, v, attention, segment_ids=segments, layout=layout)
            return jnp.sum(mixed.astype(jnp.float32) ** 2)

        keys = array(jnp.bfloat16, 1, length, 8, 128)
        arrays = array(jnp.bfloat16, 1, length, 8, 4, 128), keys, keys, array(jnp.int32, 1, length)
        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None and text is not None
    return {
        "temporary": memory.temp_size_in_bytes,
        "kernels": text.count("tpu_custom_call"),
        "permutes": text.count("collective-permute-start("),
        "gathers": text.count("all-gather-start(") + text.count(" all-gather("),
    }
