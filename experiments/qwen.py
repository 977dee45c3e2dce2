"""Qwen models at scale: pretraining of a dense one and of a mixture of experts."""

from axlearn_like.config import replace
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.training.trainer import Trainer
from experiments.device_rules import H100, H200, TPU7X, V4, V5E, V5P, V6E, Fit, pretraining_rules
from experiments.llama import DATA
from experiments.pretraining import pretraining
from experiments.registry import experiment
from models.moe import moe
from models.qwen import qwen


@experiment
def qwen25_32b(*, rows: int = 512, length: int = 8192, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Qwen2.5 32B, 4 M tokens a step in rows of 8,192, on v5p, v6e or v5e.

    Compiled for 128 v5p chips: 6.2 GB of arguments and 57 of temporary arrays a chip, of 102.8, estimated at 24 s
    (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        qwen("Qwen2.5-32B"),
        rows=rows,
        length=length,
        steps=100_000,
        peak_lr=1e-4,
        data=data,
        seed=seed,
        mesh_rules=pretraining_rules(
            rows,
            Fit((V5P, TPU7X), 16, "everything", rows=4, largest=16),
            Fit((V5P, TPU7X), 32, "context", rows=4),
            Fit((V4, V6E), 64, "everything"),
            Fit((V5E,), 128, "everything", rows=2, axes={"tensor": 4}),
            Fit((H100,), 32, "everything"),
            Fit((H200,), 8, "everything"),
        ),
    )


def _with_padding(model: Decoder.Config) -> Decoder.Config:
    """Return a mixture that routes padding too: rows of pretraining have next to none, and it costs no mask."""
    replace(model, MoE.Config, lambda cfg: cfg.set(route_padding=True))
    return model


@experiment
def qwen3_30b_a3b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Qwen3 30B-A3B (128 experts, of which a token uses 8), 4 M tokens a step, on v5p, v6e and others of their memory.

    Compiled for 64 v6e chips: a peak of 20.5 GB a chip, of 33.5; estimated at 12.0 s, 2.0 of it communication that
    overlaps nothing (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        _with_padding(moe("Qwen3-30B-A3B")),
        rows=rows,
        length=length,
        steps=100_000,
        peak_lr=3e-4,
        data=data,
        seed=seed,
        mesh_rules=pretraining_rules(
            rows,
            Fit((V5P, TPU7X), 16, "everything", rows=2, axes={"expert": 8}),
            Fit((V6E,), 64, "everything", rows=4),  # gathers experts: less than sending four rows to them
            Fit((V4,), 64, "everything", axes={"expert": 8}),
            Fit((H100,), 16, "everything", axes={"expert": 8}),
            Fit((H200,), 8, "everything", axes={"expert": 8}),
        ),
    )
