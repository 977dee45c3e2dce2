"""Llama models pretrained on TPUs: the sizes and hardware at which other stacks have published their steps."""

from axlearn_like.training.trainer import Trainer
from experiments.pretraining import LARGE_FSDP, pretraining, tpu_rule
from experiments.registry import experiment
from models.llama import llama

DATA = "data/tokens-*.array_record"


@experiment
def llama2_7b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-2 7B, 4 M tokens a step, on v5p, v6e or v5e.

    Compiled for 256 v5p chips: 1.3 GB of arguments and 56 of temporary arrays a chip, of 102.8, estimated at 2.6 s
    (docs/benchmarks/published.md), and for 16 with less at once (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        llama("Llama-2-7B"),
        rows=rows,
        length=length,
        steps=500_000,
        peak_lr=3e-4,
        data=data,
        seed=seed,
        mesh_rules=(
            tpu_rule(r"tpu-v5p-(16|32|64)", {"fsdp": -1}, "context", microbatches=4),
            tpu_rule(r"tpu-v5p-(256|512|1024)", {"data": -1, "fsdp": LARGE_FSDP}, "products"),
            tpu_rule(r"tpu-v5p-.*", {"data": -1, "fsdp": LARGE_FSDP}, "context"),
            tpu_rule(r"tpu-v(6e|5e)-.*", {"fsdp": -1}, "context", microbatches=4),
            (r".*", {"mesh": {"fsdp": -1}}),
        ),
    )


@experiment
def llama2_70b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-2 70B, 4 M tokens a step, on v5p, v6e or v5e.

    Compiled for 512 v5p chips: 13 GB of arguments and 76 of temporary arrays a chip, of 102.8, estimated at 12.3 s
    (docs/benchmarks/scaling.md), and for 128 with less at once (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        llama("Llama-2-70B"),
        rows=rows,
        length=length,
        steps=500_000,
        peak_lr=1.5e-4,
        data=data,
        seed=seed,
        mesh_rules=(
            tpu_rule(r"tpu-v5p-(16|32|64)", {"fsdp": -1}, "context", microbatches=8),
            tpu_rule(r"tpu-v5p-128", {"data": -1, "fsdp": LARGE_FSDP}, "context", microbatches=4),
            tpu_rule(r"tpu-v5p-(512|1024)", {"data": -1, "fsdp": LARGE_FSDP}, {"context": "save", "gate": "save"}),
            tpu_rule(r"tpu-v5p-.*", {"data": -1, "fsdp": LARGE_FSDP}, "context"),
            tpu_rule(r"tpu-v(6e|5e)-.*", {"fsdp": -1, "tensor": 4}, "everything"),
            (r".*", {"mesh": {"fsdp": -1}, "model.remat": "everything"}),
        ),
    )


@experiment
def llama31_8b(*, rows: int = 128, length: int = 8192, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-3.1 8B, 1 M tokens a step in rows of 8,192, on v6e, v5e or v5p.

    Compiled for 16 v6e chips with a row each at once, 12 of 33.5 GB at the peak (docs/benchmarks/aot-experiments.md).
    Not trained.
    """
    return pretraining(
        llama("Llama-3.1-8B"),
        rows=rows,
        length=length,
        steps=500_000,
        peak_lr=3e-4,
        data=data,
        seed=seed,
        mesh_rules=(
            tpu_rule(r"tpu-v6e-16", {"fsdp": -1}, "everything", microbatches=8),
            tpu_rule(r"tpu-v(6e|5e)-.*", {"fsdp": -1}, "everything"),
            tpu_rule(r"tpu-v5p-.*", {"fsdp": -1}, "context"),
            (r".*", {"mesh": {"fsdp": -1}}),
        ),
    )
