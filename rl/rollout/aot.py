"""The engine's programs, compiled for TPUs that are not there.

libtpu holds the whole TPU compiler and runs on any x86-64 Linux machine. So these are the programs that a TPU would
get, with the compiler's own plan of their memory, and its refusal where they do not fit. Nothing is executed: that
results are right is for other tests, and nothing here says how fast a step is.
"""

import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence as Items
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from mesh import UserError
from rl.rollout.device import Device
from rl.rollout.engine import RolloutEngine

# Without these libtpu asks the cloud where it is, writes logs to a common folder, and lets in one process at a time.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledStep:
    """One program; all sizes are bytes of one device.

    Attributes:
        name: the kind of dispatch and its rows.
        arguments: of weights, pool and host arrays, those that it uses.
        outputs: the pool included.
        aliased: of the outputs, what lies where an argument lay. All of the pool, where it is not copied.
        temporary: what the program needs besides.
        code: of the program itself.
        weights: as the engine holds them.
        pool: the whole of it.
        tokens: that the pool holds.
        seconds: to compile.
    """

    name: str
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    weights: int
    pool: int
    tokens: int
    seconds: float

    @property
    def beside(self) -> int:
        """What is needed while it runs, beside weights and pool."""
        from_host = max(0, self.arguments - self.weights - self.pool)
        return from_host + self.outputs - self.aliased + self.temporary


def compile_engine(
    cfg: RolloutEngine.Config, topology: str, *, only: Items[str] = ("prefill", "decode", "copy", "blank")
) -> list[CompiledStep]:
    """Compile the largest dispatch of each kind that an engine runs.

    Args:
        cfg: of the engine; an empty mesh means tensor parallelism over all devices of the topology.
        topology: generation and chips, e.g. "v5p:2x2x1" or "v6e:2x4".
        only: kinds of dispatches, the first words of their names.

    Raises:
        UserError: libtpu is missing, there is no such topology, the mesh is not one of it, or a program does not fit.
    """
    device = _described_device(cfg, topology)
    assert device.params is not None
    weights, pool = _bytes(device.params), _bytes(device.pool)
    steps = []
    for name, lower in device.lowerings().items():
        if name.split()[0] not in only:
            continue
        lowered = lower()
        began = time.monotonic()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"{name} does not fit {topology}: weights of {_gib(weights)} and pages of {_gib(pool)} per device; "
                f"the compiler says: {str(error).splitlines()[0]}"
            ) from None
        memory = compiled.memory_analysis()
        assert memory is not None
        steps.append(
            CompiledStep(
                name=name,
                arguments=memory.argument_size_in_bytes,
                outputs=memory.output_size_in_bytes,
                aliased=memory.alias_size_in_bytes,
                temporary=memory.temp_size_in_bytes,
                code=memory.generated_code_size_in_bytes,
                weights=weights,
                pool=pool,
                tokens=_pages(cfg) * cfg.page_size,
                seconds=time.monotonic() - began,
            )
        )
    return steps


def largest_pool(cfg: RolloutEngine.Config, topology: str, *, weights_held: int = 2) -> int:
    """The pages that fit into the memory that weights and programs leave.

    Found by compiling for a small pool, for what a program needs besides the pool does not depend on its size.

    Args:
        weights_held: 2 leaves room for a new version beside the one in use, which is what `set_weights` needs.

    Raises:
        UserError: not one sequence of full length fits.
    """
    least = _pages(cfg.clone(slots=1, pages=None))
    steps = compile_engine(cfg.clone(pages=least), topology)
    rest = weights_held * steps[0].weights + max(step.beside for step in steps) + sum(step.code for step in steps)
    pages = (memory_per_device(topology) - rest) // (steps[0].pool // least)
    if pages < least:
        raise UserError(
            f"{topology} has room for {max(0, pages)} pages of {cfg.page_size} tokens beside weights and programs of "
            f"{_gib(rest)}; a sequence of RolloutEngine.max_prompt + max_new tokens needs {least}"
        )
    return pages


def memory_per_device(topology: str) -> int:
    """Bytes that the compiler gives to programs, read from its refusal of one that is far too large."""
    device = _devices(topology)[0]
    huge = jax.ShapeDtypeStruct((1 << 40,), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        if found := re.search(r"available HBM \(([\d.]+)([KMGT]?)\)", str(error)):
            return int(float(found[1]) * (1 << _UNITS[found[2]]))
        raise
    raise RuntimeError(f"the compiler for {topology} accepted an array of 2 TiB")


def _described_device(cfg: RolloutEngine.Config, topology: str) -> Device:
    devices = _devices(topology)
    cfg = cfg.clone(mesh=cfg.mesh or {"tensor": len(devices)})
    return Device(cfg, pages=_pages(cfg), longest=cfg.max_prompt + cfg.max_new, described=devices)


def _devices(topology: str) -> Items[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPU compiler, is not installed; on x86-64 Linux: pip install 'axlearn-like[aot]'")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"no TPU topology {topology!r}; expected generation and chips, as in v5p:2x2x1 or v6e:2x4 "
            f"({str(error).splitlines()[0]})"
        ) from None


def _pages(cfg: RolloutEngine.Config) -> int:
    return cfg.pages or 1 + cfg.slots * -(-(cfg.max_prompt + cfg.max_new) // cfg.page_size)


def _bytes(described: Any) -> int:
    """Of one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(described)
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
