"""What a sweep tries: edits of an experiment, in the order in which they promise a fast step."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase
from axlearn_like.config_edit import set_path
from axlearn_like.flops import causal_pairs, decoder_flops, matrix_sizes
from axlearn_like.trainer import Trainer
from mesh.rules import batch_axes
from mesh.topology import Topology
from rl.experiment import RLExperiment
from tools.aot.memory import remat_presets

_MOST_MICROBATCHES = 8
_STATE = 16  # bytes of a parameter, two moments and a gradient, in float32
_ORDER_EFFICIENCY = 0.6  # of the peak, for the order alone


class Candidate(NamedTuple):
    """A way to run the same step.

    Attributes:
        mesh: axis -> size.
        remat: a preset.
        microbatches: of the batch.
        promise: seconds by a crude model; only the order counts.
    """

    mesh: dict[str, int]
    remat: str
    microbatches: int
    promise: float

    def edits(self, cfg: ConfigBase[Any]) -> dict[str, Any]:
        """Path -> value."""
        if isinstance(cfg, RLExperiment.Config):
            rows = math.prod(self.mesh.get(name, 1) for name in batch_axes()) * self.microbatches
            return {
                "trainer.mesh": self.mesh,
                "trainer.microbatches": self.microbatches,
                "trainer.row_multiple": math.lcm(rows, cfg.trainer.row_multiple),
                "policy.remat": self.remat,
            }
        return {"mesh": self.mesh, "microbatches": self.microbatches, "model.remat": self.remat}

    def applied[C: ConfigBase[Any]](self, cfg: C) -> C:
        """A copy of the config with the edits."""
        cfg = cfg.clone()
        for path, value in self.edits(cfg).items():
            set_path(cfg, path, value)
        return cfg

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        return f"{mesh}, remat {self.remat}, {self.microbatches} microbatches"


def candidates(cfg: ConfigBase[Any], topology: Topology, available: int) -> list[Candidate]:
    """All that divide evenly and whose parameters alone fit, the most promising first.

    Pipeline, expert and sequence axes stay as the experiment has them; data, fsdp and tensor are tried.

    Args:
        cfg: a supervised trainer or an RL experiment.
        topology: of the devices.
        available: bytes of one device.
    """
    model, mesh, rows, length = _job(cfg)
    fixed = {name: size for name, size in mesh.items() if name in ("pipeline", "expert", "sequence") and size > 1}
    free, rest = divmod(topology.devices, math.prod(fixed.values()))
    if rest:
        return []
    sizes = matrix_sizes(model)
    found = []
    for data, fsdp, tensor in _factors(free):
        shape = {"data": data, **fixed, "fsdp": fsdp, "tensor": tensor}
        if _STATE * sum(sizes) / (fsdp * tensor) > available or _heads(model) % tensor:
            continue
        microbatches = [n for n in _powers(_MOST_MICROBATCHES) if rows % (data * fsdp * n) == 0]
        for remat, count in itertools.product(remat_presets(), microbatches):
            promise = _promise(model, topology, shape, remat, count, rows, length)
            shape = {name: size for name, size in shape.items() if size > 1} or {"fsdp": 1}
            found.append(Candidate(shape, remat, count, promise))
    return sorted(found, key=lambda one: (one.promise, str(one)))


def _job(cfg: ConfigBase[Any]) -> tuple[ConfigBase[Any], dict[str, int], int, int]:
    """Model, mesh, rows and their length."""
    if isinstance(cfg, RLExperiment.Config):
        each_row = cfg.trainer.samples_per_row or cfg.samples
        rows = cfg.groups * cfg.samples // each_row
        return cfg.policy, cfg.trainer.mesh, rows, cfg.max_prompt + each_row * cfg.max_new
    assert isinstance(cfg, Trainer.Config)
    return cfg.model, cfg.mesh, cfg.input.batch_size, cfg.input.seq_len


def _heads(model: Any) -> int:
    attention = model.block.attention
    return attention.num_kv_heads or attention.num_heads


def _powers(most: int) -> Iterator[int]:
    return (1 << n for n in range(most.bit_length()))


def _factors(count: int) -> Iterator[tuple[int, int, int]]:
    """(data, fsdp, tensor) with that product."""
    for fsdp in range(1, count + 1):
        for tensor in _powers(count):
            if count % (fsdp * tensor) == 0:
                yield count // (fsdp * tensor), fsdp, tensor


def _promise(
    model: Any, topology: Topology, mesh: dict[str, int], remat: str, microbatches: int, rows: int, length: int
) -> float:
    """Compute at a fixed efficiency, and half of the communication, which would be beside it."""
    chip, presets = topology.generation, remat_presets()
    data, fsdp, tensor = (mesh.get(name, 1) for name in ("data", "fsdp", "tensor"))
    tokens = rows * length
    flops = decoder_flops(
        model, tokens=tokens, head_tokens=tokens, pairs=causal_pairs(rows, length), backward=True
    )
    # The presets stand in the order of what they recompute: from nothing to all of a forward pass.
    recomputed = presets.index(remat) / max(1, len(presets) - 1) / 3
    compute = flops * (1 + recomputed) / (topology.devices * chip.per_device(chip.flops) * _ORDER_EFFICIENCY)
    parameters = sum(matrix_sizes(model))
    gathered = 3 * 2 * parameters / tensor * microbatches * (fsdp - 1) / fsdp
    reduced = 4 * 2 * parameters / (fsdp * tensor) * (data - 1) / data
    mixed = 16 * 2 * model.num_layers * model.dim * tokens / (data * fsdp) * (tensor - 1) / tensor
    return compute + 0.5 * (gathered + reduced + mixed) / (2 * chip.link)
