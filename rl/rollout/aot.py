"""The engine's programs, compiled for TPUs that are not there (see `mesh.cost.ahead_of_time`)."""

import dataclasses
import math
from collections.abc import Sequence as Items
from typing import Any

import jax
from jax.sharding import Mesh

from mesh import UserError
from mesh.cost.ahead_of_time import compile_step
from mesh.cost.ahead_of_time import memory_per_device as _memory_per_device
from mesh.topology import Topology, parse_topology, topology_devices
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.runner import Device, Dispatch


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


def engine_dispatches(cfg: RolloutEngine.Config, devices: Items[Any]) -> tuple[Mesh, list[Dispatch]]:
    """Return the engine's mesh, and the dispatches that it runs, of each kind the largest."""
    device = _described_device(cfg, devices)
    return device.mesh, device.dispatches()


def compile_engine(
    cfg: RolloutEngine.Config, topology: str, *, only: Items[str] = ("prefill", "decode", "copy", "blank")
) -> list[CompiledStep]:
    """Compile the largest dispatch of each kind that an engine runs.

    Args:
        cfg: of the engine; an empty mesh means tensor parallelism over all devices of the topology.
        topology: generation and chips, e.g. "v5p:2x2x1" or "v6e:2x4".
        only: kinds of dispatches.

    Raises:
        UserError: libtpu is missing, there is no such topology, the mesh is not one of it, or a program does not fit.
    """
    found = parse_topology(topology)
    device = _described_device(cfg, topology_devices(found))
    assert device.params is not None
    weights, pool = _bytes(device.params), _bytes(device.pool)
    steps = []
    for dispatch in device.dispatches():
        if dispatch.kind not in only:
            continue
        name = dispatch.name
        compiled = compile_step(name, dispatch.trace, device.mesh, found)
        if compiled.executable is None or compiled.memory is None:
            assert compiled.shortage is not None
            raise UserError(
                f"{name} does not fit {topology}: weights of {_gib(weights)} and pages of {_gib(pool)} per device; "
                f"the compiler says: {compiled.shortage.message}"
            )
        memory = compiled.memory
        steps.append(
            CompiledStep(
                name=name,
                arguments=memory.arguments,
                outputs=memory.output,
                aliased=memory.alias,
                temporary=memory.temp,
                code=memory.code,
                weights=weights,
                pool=pool,
                tokens=_pages(cfg) * cfg.page_size,
                seconds=compiled.cost.compile_s,
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
    least = _pages(cfg.clone(max_num_seqs=1, pages=None))
    steps = compile_engine(cfg.clone(pages=least), topology)
    rest = weights_held * steps[0].weights + max(step.beside for step in steps) + sum(step.code for step in steps)
    pages = (memory_per_device(topology) - rest) // (steps[0].pool // least)
    if pages < least:
        raise UserError(
            f"{topology} has room for {max(0, pages)} pages of {cfg.page_size} tokens beside weights and programs of "
            f"{_gib(rest)}; a sequence of RolloutEngine.max_prompt + max_new tokens needs {least}"
        )
    return pages


def memory_per_device(topology: str | Topology) -> int:
    """Bytes that the compiler gives to programs."""
    return _memory_per_device(parse_topology(topology) if isinstance(topology, str) else topology)


def _described_device(cfg: RolloutEngine.Config, devices: Items[Any]) -> Device:
    cfg = cfg.clone(mesh=cfg.mesh or {"tensor": len(devices)})
    return Device(cfg, pages=_pages(cfg), longest=cfg.max_prompt + cfg.max_new, described=devices)


def _pages(cfg: RolloutEngine.Config) -> int:
    return cfg.pages or 1 + cfg.max_num_seqs * -(-(cfg.max_prompt + cfg.max_new) // cfg.page_size)


def _bytes(described: Any) -> int:
    """Of one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(described)
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
