"""Llama models pretrained on TPUs: the sizes and hardware at which other stacks have published their steps."""

from axlearn_like.trainer import Trainer
from experiments.pretraining import pretraining, tpu_rule
from experiments.registry import experiment
from models.llama import llama

DATA = "data/tokens-*.array_record"


@experiment
def llama2_7b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-2 7B, 4 M tokens a step; v5p from 16 chips, v6e and v5e from 64.

    Memory of a chip: docs/aot-experiments.md. Not trained here: the figures are the TPU compiler's.
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
            tpu_rule(r"tpu-v5p-.*", {"fsdp": -1}, "context"),
            tpu_rule(r"tpu-v(6e|5e)-.*", {"fsdp": -1}, "context", microbatches=4),
            (r".*", {"mesh": {"fsdp": -1}}),
        ),
    )


@experiment
def llama2_70b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-2 70B, 4 M tokens a step, on v5p from 128 chips; v6e from 256.

    Memory of a chip: docs/aot-experiments.md. Not trained here: the figures are the TPU compiler's.
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
            tpu_rule(r"tpu-v5p-128", {"fsdp": -1}, "context", microbatches=4),
            tpu_rule(r"tpu-v5p-.*", {"fsdp": -1}, "context"),
            tpu_rule(r"tpu-v(6e|5e)-.*", {"fsdp": -1, "tensor": 4}, "everything"),
            (r".*", {"mesh": {"fsdp": -1}, "model.remat": "everything"}),
        ),
    )


@experiment
def llama31_8b(*, rows: int = 128, length: int = 8192, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-3.1 8B, 1 M tokens a step in rows of 8,192; v6e from 16 chips, v5p from 8.

    Memory of a chip: docs/aot-experiments.md. Not trained here: the figures are the TPU compiler's.
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
