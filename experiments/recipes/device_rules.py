"""Mesh rules that experiments share: a line for each class of devices on which a model fits, the arithmetic once.

A `Fit` names the smallest slice that has room for a model, with how many rows on a device at a time. Rules for larger
slices follow: rows on a device stay as many (fewer microbatches) and the share of the state falls, so what fits the
smallest fits them. Smaller slices have no rule, which refuses them. What the compiler says of each:
docs/reference/mesh-rules.md.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from axlearn_like.config import MeshRules
from axlearn_like.layers.decoder import Decoder
from axlearn_like.remat import Remat
from experiments.recipes.kept import remat_by_memory
from experiments.recipes.sizes import TrainingWay, model_sizes
from mesh.generations import GENERATIONS

# Names of devices without their number, as `mesh.device_name` has them; tpu7x counts chiplets, two to a chip.
V4, V5E, V5P, V6E, TPU7X = "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu7x"
H100, H200 = "gpu-nvidia-h100.*", "gpu-nvidia-h200"
CPU = "cpu"

# XLA for TPUs cuts a product with a gathered matrix into a loop of small ones, each beside a part of the gathering. By
# its own cycle estimates that costs far more than it hides: a step of Llama-2 7B on 16 v5p chips 2.7 s instead of 1.5.
TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

# The SparseCores gather parameters and sum gradients beside the products, by asynchronous all-gathers and
# reduce-scatters, where XLA by itself makes synchronous ones and all-reduces, over whole slices of v5p all-reduces
# alone (docs/benchmarks/aot-experiments.md). MaxText's for v5p (benchmarks/xla_flags_library.py and its recipes).
OFFLOAD_OPTIONS = {
    "xla_enable_async_all_gather": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_tpu_enable_3d_reduce_scatter_decomposer": "false",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": "true",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
}
_OFFLOADED = (V5P, V6E)

# Over all 128 or 512 chips of a slice XLA makes all-reduces of arrays that are zero elsewhere, where parameters are to
# be gathered: twice the bytes. Over 16 or 64 it gathers them; gradients it sums by all-reduces there too, but for some
# that it scatters over 64. The other chips are data-parallel.
LARGE_FSDP = 64

_LARGEST = {V5E: 256, V6E: 256, H100: 256, H200: 256}  # devices for which there are rules
_LARGEST_OF_OTHERS = 1024
_CPU_DEVICES = 8  # limit of devices that one machine shows

Edits = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fit:
    """A way to train a model on devices of some kinds, which have about as much memory each."""

    kinds: tuple[str, ...]  # kinds of the devices; all TPUs, or none
    smallest: int  # devices of the smallest slice that has room for it: compiled for TPUs, computed for GPUs
    remat: str | Remat | None  # arrays that the backward pass finds stored; None: those that the memory has room for
    rows: int = 1  # rows of a device at a time; where devices share rows, of each group of them
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])  # sizes of axes beside data and fsdp
    largest: int | None = None  # devices of the largest slice; None: what is sold

    def sizes(self) -> list[tuple[int, tuple[str, ...]]]:
        """Return numbers of devices, powers of two, and the kinds of which so many are sold."""
        largest = {kind: self.largest or _LARGEST.get(kind, _LARGEST_OF_OTHERS) for kind in self.kinds}
        exponents = range(self.smallest.bit_length() - 1, max(largest.values()).bit_length())
        return [(1 << n, tuple(kind for kind in self.kinds if 1 << n <= largest[kind])) for n in exponents]

    def mesh(self, devices: int) -> dict[str, int]:
        """Return the mesh of so many devices: parameters over at most `LARGE_FSDP`, beside them data-parallel."""
        wide = devices // math.prod(self.axes.values()) > LARGE_FSDP
        return {**({"data": -1, "fsdp": LARGE_FSDP} if wide else {"fsdp": -1}), **self.axes}

    def batch_shards(self, devices: int) -> int:
        """Return over how many devices, or groups of them, the rows of a batch are sharded."""
        return devices // math.prod(size for axis, size in self.axes.items() if axis != "expert")

    def remat_of(self, model: Decoder.Config, devices: int, length: int, rows: int, accumulated: bool) -> Remat:
        """Return what so many devices have room to store of `rows` rows of a device at a time."""
        axes, tokens = math.prod(self.axes.values()), rows * length
        shards, shared = axes * min(LARGE_FSDP, devices // axes), self.axes.get("tensor", 1)
        way = TrainingWay("sft", "full", shards, shared, 1, tokens, tokens, keeps=False, accumulated=accumulated)
        memory = min(_memory(kind) for kind in self.kinds)
        return remat_by_memory(model_sizes(model), way, length, memory)

    def by_compiler(self) -> list["Fit"]:
        """Return it for kinds whose collectives the SparseCores run, and for the others."""
        kinds = (tuple(one for one in self.kinds if (one in _OFFLOADED) == offloaded) for offloaded in (True, False))
        return [dataclasses.replace(self, kinds=some) for some in kinds if some]

    def compiler_options(self, prefix: str = "") -> Edits:
        """Return the edit with the compiler's options; `prefix`: of the trainer's path."""
        options = compiler_options(self.kinds[0])
        return {f"{prefix}compiler_options": options} if options else {}


def _memory(kind: str) -> float:
    """Return the bytes of a TPU of a kind, as it is sold."""
    generation = GENERATIONS.get(kind.removeprefix("tpu-"))
    if generation is None:
        raise ValueError(f"Fit: no figures of what {kind} has room to store; expected a remat of its own")
    return generation.per_device(generation.hbm)


def compiler_options(kind: str) -> dict[str, str]:
    """Return the compiler's options of a train step on devices of a kind."""
    if not kind.startswith("tpu"):
        return {}
    return TPU_OPTIONS | (OFFLOAD_OPTIONS if kind in _OFFLOADED else {})


def pretraining_rules(rows: int, *fits: Fit, model: Decoder.Config | None = None, length: int = 0) -> MeshRules:
    """Return the rules of a supervised experiment whose batches have so many rows, one at a time on a CPU.

    `model`, `length`: what is trained, and the tokens of a row, for fits that store what the memory has room for.
    """

    def edits(fit: Fit, devices: int) -> Edits | None:
        shards = fit.batch_shards(devices)
        if rows % shards:
            return None
        microbatches = max(1, rows // (shards * fit.rows))
        remat = fit.remat
        if remat is None:
            assert model is not None, "a fit without remat takes a model"
            remat = fit.remat_of(model, devices, length, rows // (shards * microbatches), microbatches > 1)
        mesh = {"mesh": fit.mesh(devices), "microbatches": microbatches, "model.remat": remat}
        return mesh | fit.compiler_options()

    on_cpu = {"mesh": {"fsdp": -1}, "microbatches": max(1, rows // _CPU_DEVICES), "model.remat": "everything"}
    return (*_rules(fits, edits), (f"{CPU}-.*", on_cpu))


def packed_rl_rules(*fits: Fit) -> MeshRules:
    """Return the rules of an RL experiment whose trainer packs rollouts into rows.

    Microbatches are as many as the rollouts fill: only the rows of each depend on the devices.
    """

    def edits(fit: Fit, devices: int) -> Edits:
        mesh = {"trainer.mesh": fit.mesh(devices), "trainer.packing.rows": fit.rows, "policy.remat": fit.remat}
        return mesh | fit.compiler_options("trainer.")

    on_cpu = {"trainer.mesh": {"fsdp": -1}, "policy.remat": "everything"}
    return (*_rules(fits, edits), (f"{CPU}-.*", on_cpu))


def _rules(fits: tuple[Fit, ...], edits: Callable[[Fit, int], Edits | None]) -> MeshRules:
    """Return a rule for each run of sizes that has the same kinds and edits."""
    rules: list[tuple[str, Edits]] = []
    for fit in itertools.chain.from_iterable(fit.by_compiler() for fit in fits):
        made = [(size, (kinds, edits(fit, size))) for size, kinds in fit.sizes()]
        for (kinds, chosen), group in itertools.groupby(made, key=lambda one: one[1]):
            if chosen is not None:
                rules.append((f"{_one_of(kinds)}-{_one_of([str(size) for size, _ in group])}", chosen))
    return tuple(rules)


def _one_of(texts: tuple[str, ...] | list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"
