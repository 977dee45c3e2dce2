"""An engine's programs compiled for absent TPUs: what each needs of a device, and the largest pool that fits."""

import dataclasses
import math
from collections.abc import Sequence as Items
from typing import Any

import jax

from mesh import UserError
from mesh.cost.ahead_of_time import compile_steps, memory_per_device
from mesh.cost.traffic import operations
from mesh.topology import parse_topology, topology_devices
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import described_runner, largest_dispatches


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
    runner = described_runner(cfg, topology_devices(found))
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
    pages = (memory_per_device(parse_topology(topology)) - rest) // (steps[0].pool // least)
    if pages < least:
        raise UserError(
            f"{topology} has room for {max(0, pages)} pages of {cfg.page_size} tokens beside weights and programs of "
            f"{_gib(rest)}; a sequence of RolloutEngine.max_prompt_tokens + max_new_tokens tokens needs {least}"
        )
    return pages


def _bytes(described: Any) -> int:
    """Return the bytes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(described)
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
