"""Llama models pretrained on TPUs: the sizes and hardware at which other stacks have published their steps."""

from axlearn_like.training.trainer import Trainer
from experiments.device_rules import H100, H200, TPU7X, V4, V5E, V5P, V6E, Fit, pretraining_rules
from experiments.pretraining import pretraining
from experiments.registry import experiment
from models.llama import llama

DATA = "data/tokens-*.array_record"


@experiment
def llama2_7b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-2 7B, 4 M tokens a step, on v5p, v6e or v5e.

    Compiled for 256 v5p chips: 1.3 GB of arguments and 56 of temporary arrays a chip, of 102.8, estimated at 2.5 s
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
        mesh_rules=pretraining_rules(
            rows,
            Fit((V5P, TPU7X), 4, "context", rows=4, largest=8),
            Fit((V5P, TPU7X), 16, "context", rows=16, largest=128),
            Fit((V5P, TPU7X), 256, "products", rows=4),
            Fit((V4, V6E), 8, "context", rows=2),
            Fit((V5E,), 16, "context"),
            Fit((H100,), 8, "context", rows=2),
            Fit((H200,), 4, "context", rows=2),
        ),
    )


@experiment
def llama2_70b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-2 70B, 4 M tokens a step, on v5p, v6e and others of their memory.

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
        mesh_rules=pretraining_rules(
            rows,
            Fit((V5P, TPU7X), 32, "context", rows=2, largest=32),
            Fit((V5P, TPU7X), 64, "context", rows=4, largest=256),
            Fit((V5P, TPU7X), 512, {"context": "save", "gate": "save"}, rows=2),
            Fit((V4, V6E), 128, "everything", rows=2, axes={"tensor": 4}),
            Fit((H100,), 64, "everything"),
            Fit((H200,), 16, "everything"),
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
        mesh_rules=pretraining_rules(
            rows,
            Fit((V5P, TPU7X), 4, "context", rows=4),
            Fit((V4, V6E), 16, "context"),
            Fit((V5E,), 32, "everything"),
            Fit((H100,), 8, "context"),
            Fit((H200,), 4, "context"),
        ),
    )
