"""Texts of Pallas kernels as they go to the TPU compiler, to see what in them depends on the size of a batch.

A kernel is lowered to a module of Mosaic, the compiler's language for kernels, which jax stores in the program. It has
all of a step's arithmetic, in order, and no licence to change that order (`fastmath<none>`). A batch shows in the
number of steps, and in the sizes of arrays outside of fast memory, with which nothing is computed. No compiler is
needed.
"""

import base64
import json
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from mesh.mesh import MESH_AXES

_ONE: Any = {
    "axis_types": (AxisType.Explicit,) * len(MESH_AXES),
    "abstract_device": AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu"),
}
_CALL = re.compile(r'@tpu_custom_call\(.*?backend_config = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\([0-9A-Fa-f]{2})")
_STEPS = re.compile(r"iteration_bounds = array<i64[^>]*>")
_OUTSIDE = re.compile(r"memref<[^<>]*(?:<[^<>]*>)?[^<>]*#tpu\.memory_space<(?:smem|any|hbm)>>")  # tables, and the pool


def mosaic_texts(run: Callable[..., Any], *arrays: Any) -> list[str]:
    """Return the text of each kernel in a program of described arrays, in order, without places in source files."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,) * len(MESH_AXES), MESH_AXES, **_ONE)):
        return texts_of(jax.jit(run).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text())


def texts_of(program: str) -> list[str]:
    """Return the text of each kernel in the text of a lowered program, as `mosaic_texts` does."""
    configs = [_ESCAPED.sub(lambda code: chr(int(code[1], 16)), found) for found in _CALL.findall(program)]
    return [mosaic_text(base64.b64decode(json.loads(one)["custom_call_config"]["body"])) for one in configs]


def without_batch(text: str) -> str:
    """Return a kernel's text without the number of its steps and the sizes of what lies outside of fast memory."""
    return _OUTSIDE.sub("memref<outside>", _STEPS.sub("steps", text))


def steps_of(text: str) -> list[int]:
    """Return the bounds of a kernel's grid."""
    found = re.search(r"iteration_bounds = array<i64: ([\d, ]*)>", text)
    return [int(bound) for bound in found[1].split(",")] if found else []


def mosaic_text(body: bytes) -> str:
    """Return the text of a module of Mosaic, the compiler's language for TPU kernels, without places in sources."""
    from jax._src.interpreters.mlir import make_ir_context
    from jax._src.lib import tpu  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    context = make_ir_context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        return str(ir.Module.parse(body).operation.get_asm(enable_debug_info=False))
