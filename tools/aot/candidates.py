"""The candidates of a sweep: edits of an experiment, in the order in which they promise a fast step."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase, set_path
from axlearn_like.layers.block_pattern import first_block
from axlearn_like.operations.flops import active_weights, model_flops, rows_workload
from axlearn_like.training.program import Tuning
from mesh.topology import Topology
from tools.aot.run import tuning_of
from tools.aot.table import remat_presets

_KEPT = ("pipeline", "expert", "sequence")  # axes that stay as the experiment has them
_MOST_MICROBATCHES = 8
_STATE = 16  # bytes of a parameter, two moments and a gradient, in float32
_ORDER_EFFICIENCY = 0.6  # share of the peak, used for the order alone


class Candidate(NamedTuple):
    """A way to run the same step."""

    mesh: dict[str, int]  # axis -> size
    remat: str  # a preset
    microbatches: int  # number of microbatches of the batch
    promise: float  # seconds by a crude model; only the order counts

    def edits(self, tuning: Tuning) -> dict[str, Any]:
        """Return the edits of the experiment, path -> value."""
        return tuning.edits(self.mesh, self.remat, self.microbatches)

    def applied[C: ConfigBase[Any]](self, cfg: C) -> C:
        """Return a copy of the config with the edits."""
        cfg = cfg.clone()
        for path, value in self.edits(tuning_of(cfg)).items():
            set_path(cfg, path, value)
        return cfg

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        return f"{mesh}, remat {self.remat}, {self.microbatches} microbatches"


def candidates(cfg: ConfigBase[Any], topology: Topology, available: int) -> list[Candidate]:
    """Return all candidates that divide evenly and whose parameters alone fit, the most promising first.

    Pipeline, expert and sequence axes stay as the experiment has them; data, fsdp and tensor are tried.

    Args:
        available: bytes of one device.
    """
    job = _job(tuning_of(cfg))
    found = []
    for shape in _searched(job, topology, available):
        shards = job.tuning.batch_shards(shape)
        counts = [n for n in _powers(_MOST_MICROBATCHES) if job.tuning.rows % (shards * n) == 0]
        for remat, count in itertools.product(remat_presets(), counts):
            found.append(Candidate(shape, remat, count, _promise(job, topology, shape, remat, count)))
    return sorted(found, key=lambda one: (one.promise, str(one)))


def _searched(job: "_Job", topology: Topology, available: int) -> Iterator[dict[str, int]]:
    fixed = {name: size for name, size in job.tuning.mesh.items() if name in _KEPT and size > 1}
    free, rest = divmod(topology.devices, math.prod(fixed.values()))
    if rest:
        return
    for data, fsdp, tensor in _factors(free):
        if _STATE * job.parameters / (fsdp * tensor) > available or _heads(job.tuning.model) % tensor:
            continue
        shape = {"data": data, **fixed, "fsdp": fsdp, "tensor": tensor}
        yield {name: size for name, size in shape.items() if size > 1} or {"fsdp": 1}


class _Job(NamedTuple):
    """The work of a step, whatever the mesh; counting it takes longer than all the rest."""

    tuning: Tuning
    tokens: int
    parameters: float
    flops: float


def _job(tuning: Tuning) -> _Job:
    tokens = tuning.rows * tuning.length
    flops = model_flops(tuning.model, rows_workload(tuning.rows, tuning.length), backward=True)
    return _Job(tuning, tokens, active_weights(tuning.model), flops)


def _heads(model: Any) -> int:
    attention: Any = first_block(model.block).attention  # pyright: ignore[reportAttributeAccessIssue]
    return attention.num_kv_heads or attention.num_heads


def _powers(most: int) -> Iterator[int]:
    return (1 << n for n in range(most.bit_length()))


def _factors(count: int) -> Iterator[tuple[int, int, int]]:
    """(data, fsdp, tensor) with that product."""
    for fsdp in range(1, count + 1):
        for tensor in _powers(count):
            if count % (fsdp * tensor) == 0:
                yield count // (fsdp * tensor), fsdp, tensor


def _promise(job: _Job, topology: Topology, mesh: dict[str, int], remat: str, microbatches: int) -> float:
    """Compute at a fixed efficiency, and half of the communication, which would be beside it."""
    chip, presets = topology.generation, remat_presets()
    data, fsdp, tensor = (mesh.get(name, 1) for name in ("data", "fsdp", "tensor"))
    # The presets stand in the order of what they recompute: from nothing to all of a forward pass.
    recomputed = presets.index(remat) / max(1, len(presets) - 1) / 3
    compute = job.flops * (1 + recomputed) / (topology.devices * chip.per_device(chip.flops) * _ORDER_EFFICIENCY)
    gathered = 3 * 2 * job.parameters / tensor * microbatches * (fsdp - 1) / fsdp
    reduced = 4 * 2 * job.parameters / (fsdp * tensor) * (data - 1) / data
    mixed = (
        16 * 2 * job.tuning.model.num_layers * job.tuning.model.dim * job.tokens / (data * fsdp) * (tensor - 1) / tensor
    )
    return compute + 0.5 * (gathered + reduced + mixed) / (2 * chip.link)
