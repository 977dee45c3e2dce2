"""Ahead-of-time compilation of the engine's programs for absent TPUs (see `mesh.cost.ahead_of_time`)."""

import dataclasses
import math
from collections.abc import Sequence as Items
from typing import Any

import jax
from jax.sharding import Mesh

from mesh import UserError
from mesh.cost.ahead_of_time import compile_steps
from mesh.cost.ahead_of_time import memory_per_device as _memory_per_device
from mesh.cost.traffic import operations
from mesh.topology import Topology, parse_topology, topology_devices
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import Dispatch, largest_dispatches, run_dispatches
from rl.rollout.model_runner.runner import ModelRunner


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledDispatch:
    """One program; all sizes are bytes of one device.

    Attributes:
        name: the kind of dispatch and its rows.
        arguments: weights, pool and host arrays that it uses.
        outputs: the pool included.
        aliased: the part of the outputs that is updated in place. All of the pool, unless it is copied.
        temporary: other memory of the program.
        code: code of the program itself.
        weights: as the engine holds them.
        pool: all of it.
        tokens: capacity of the pool.
        moved: between HBM and the chip in one run; of decoding, all steps of a dispatch with all rows at full length.
        seconds: seconds to compile.
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
    moved: int
    seconds: float

    @property
    def beside(self) -> int:
        """Memory that it needs while it runs, beside weights and pool."""
        from_host = max(0, self.arguments - self.weights - self.pool)
        return from_host + self.outputs - self.aliased + self.temporary


def engine_dispatches(cfg: RolloutEngine.Config, devices: Items[Any]) -> tuple[Mesh, list[Dispatch]]:
    """Return the engine's mesh, and the dispatches that it runs, of each kind the largest."""
    runner = _described_runner(cfg, devices)
    return runner.mesh, largest_dispatches(runner)


def programs_of_run(cfg: RolloutEngine.Config, devices: Items[Any]) -> tuple[Mesh, list[Dispatch]]:
    """Return the mesh of a run's engine, which is one device if it is {}, and the dispatches that it makes."""
    runner = ModelRunner(cfg, devices if cfg.mesh else devices[:1])
    return runner.mesh, run_dispatches(runner)


def compile_engine(
    cfg: RolloutEngine.Config, topology: str, *, only: Items[str] = ("prefill", "decode", "verify", "copy", "zero")
) -> list[CompiledDispatch]:
    """Compile the largest dispatch of each kind that an engine runs, as many at a time as there are cores.

    Args:
        cfg: its mesh; an empty one means tensor parallelism over all devices of the topology.
        topology: generation and chips, e.g. "v5p:2x2x1" or "v6e:2x4".
        only: kinds of dispatches.

    Raises:
        UserError: libtpu is missing, there is no such topology, the mesh is not one of it, or a program does not fit.
    """
    found = parse_topology(topology)
    runner = _described_runner(cfg, topology_devices(found))
    assert runner.params is not None
    weights, pool = _bytes(runner.params), _bytes(runner.cache.pool)
    steps = []
    wanted = [(one.name, one.trace) for one in largest_dispatches(runner) if one.kind in only]
    for compiled in compile_steps(wanted, runner.mesh, found):
        name = compiled.name
        if compiled.executable is None or compiled.memory is None:
            assert compiled.shortage is not None
            raise UserError(
                f"{name} does not fit {topology}: weights of {_gib(weights)} and pages of {_gib(pool)} per device; "
                f"the compiler says: {compiled.shortage.message}"
            )
        memory, program = compiled.memory, compiled.hlo
        steps.append(
            CompiledDispatch(
                name=name,
                arguments=memory.arguments,
                outputs=memory.output,
                aliased=memory.alias,
                temporary=memory.temp,
                code=memory.code,
                weights=weights,
                pool=pool,
                tokens=cfg.pool_pages * cfg.page_size,
                moved=round(sum(one.times * one.bytes for one in operations(program))) if program else 0,
                seconds=compiled.cost.compile_s,
            )
        )
    return steps


def largest_pool(cfg: RolloutEngine.Config, topology: str, *, weights_held: int = 2) -> int:
    """Return the number of pages that fit beside weights and programs.

    Found by compiling for a small pool: what a program needs besides the pool does not depend on its size.

    Args:
        cfg: its `pages` are not used.
        topology: as `compile_engine`'s.
        weights_held: 2 leaves room for a new version beside the one in use, as `set_weights` needs.

    Raises:
        UserError: not one sequence of full length fits.
    """
    least = cfg.clone(max_num_seqs=1, pages=None).pool_pages
    steps = compile_engine(cfg.clone(pages=least), topology)
    rest = weights_held * steps[0].weights + max(step.beside for step in steps) + sum(step.code for step in steps)
    pages = (memory_per_device(topology) - rest) // (steps[0].pool // least)
    if pages < least:
        raise UserError(
            f"{topology} has room for {max(0, pages)} pages of {cfg.page_size} tokens beside weights and programs of "
            f"{_gib(rest)}; a sequence of RolloutEngine.max_prompt_tokens + max_new_tokens tokens needs {least}"
        )
    return pages


def memory_per_device(topology: str | Topology) -> int:
    """Return the bytes that the compiler gives to programs."""
    return _memory_per_device(parse_topology(topology) if isinstance(topology, str) else topology)


def _described_runner(cfg: RolloutEngine.Config, devices: Items[Any]) -> ModelRunner:
    wanted = math.prod(cfg.mesh.values())
    if cfg.mesh and -1 not in cfg.mesh.values() and wanted != len(devices):
        text = " x ".join(f"{name} {size}" for name, size in cfg.mesh.items())
        raise UserError(
            f"RolloutEngine.mesh {text} needs {wanted} devices but there are {len(devices)}: an engine has all devices "
            f"of a topology to itself; compile it for one of {wanted}, as each rollout worker has them"
        )
    cfg = cfg.clone(mesh=cfg.mesh or {"tensor": len(devices)})
    cfg.check()
    return ModelRunner(cfg, devices)


def _bytes(described: Any) -> int:
    """Return the bytes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(described)
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
