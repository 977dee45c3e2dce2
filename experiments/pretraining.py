"""Models pretrained on TPUs, at the sizes and hardware at which other stacks have published their steps.

Documents in, AdamW with warm-up and cosine, activations in bfloat16. None of them was trained here.
"""

from typing import NamedTuple

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import replace
from axlearn_like.input import ArrayRecord, SupervisedInput, TokenIds, json_record
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.learner import AdamW, Learner, WarmupCosine
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.trainer import Trainer
from experiments.recipes.device_rules import H100, H200, TPU7X, V4, V5E, V5P, V6E, Fit, pretraining_rules
from experiments.registry import experiment
from models.llama import llama
from models.moe import moe
from models.qwen import qwen

DATA = "data/tokens-*.array_record"


class Documents(NamedTuple):
    """Documents to train on, in the rows of a batch."""

    rows: int  # rows of the global batch
    length: int  # tokens of a row; a longer document is cut
    data: str  # ArrayRecord files whose records are JSON objects with a list of token ids, `tokens`
    seed: int  # seed of parameters and data order


def pretraining(model: Decoder.Config, documents: Documents, *fits: Fit, steps: int, peak_lr: float) -> Trainer.Config:
    """A trainer of next tokens on packed documents.

    Args:
        model: a decoder.
        documents: what it is trained on.
        fits: what was found to fit on which devices.
        steps: updates in all; the first 2,000, or a tenth if that is less, warm up.
        peak_lr: the highest learning rate; it ends at a tenth of that.
    """
    rows, length, data, seed = documents
    return Trainer.Config(
        model=model,
        input=SupervisedInput.Config(
            source=ArrayRecord.Config(
                files=data, decode=json_record, tokenizer=None, example=TokenIds.Config(tokens="tokens")
            ),
            seq_len=length,
            batch_size=rows,
            long="split",
            seed=seed,
        ),
        learner=Learner.Config(
            optimizer=AdamW.Config(b1=0.9, b2=0.95, weight_decay=0.1),
            schedule=WarmupCosine.Config(
                peak_lr=peak_lr, warmup_steps=min(2000, steps // 10), total_steps=steps, end_lr=peak_lr / 10
            ),
        ),
        loss=SupervisedLoss.Config(chunks=8, z_loss=1e-4),
        checkpoint=Checkpointer.Config(save_every=1000),
        mesh_rules=pretraining_rules(rows, *fits, model=model, length=length),
        num_steps=steps,
        seed=seed,
    )


@experiment
def llama2_7b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-2 7B, 4 M tokens a step, on v5p, v6e or v5e.

    Compiled for 256 v5p chips: 1.3 GB of arguments and 56 of temporary arrays a chip, of 102.8, estimated at 2.5 s
    (docs/benchmarks/published.md), and for 16 with less at once (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        llama("Llama-2-7B"),
        Documents(rows, length, data, seed),
        Fit((V5P, TPU7X), 4, "context", rows=4, largest=8),
        Fit((V5P, TPU7X), 16, "context", rows=16, largest=128),
        Fit((V5P, TPU7X), 256, "products", rows=4),
        Fit((V4, V6E), 8, "context", rows=2),
        Fit((V5E,), 16, "context"),
        Fit((H100,), 8, "context", rows=2),
        Fit((H200,), 4, "context", rows=2),
        steps=500_000,
        peak_lr=3e-4,
    )


@experiment
def llama2_70b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-2 70B, 4 M tokens a step, on v5p, v6e and others of their memory.

    Compiled for 512 v5p chips: 13 GB of arguments and 76 of temporary arrays a chip, of 102.8, estimated at 12.3 s
    (docs/benchmarks/scaling.md), and for 128 with less at once (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        llama("Llama-2-70B"),
        Documents(rows, length, data, seed),
        Fit((V5P, TPU7X), 32, "context", rows=2, largest=32),
        Fit((V5P, TPU7X), 64, "context", rows=4, largest=256),
        Fit((V5P, TPU7X), 512, {"context": "save", "gate": "save"}, rows=2),
        Fit((V4, V6E), 128, "everything", rows=2, axes={"tensor": 4}),
        Fit((H100,), 64, "everything"),
        Fit((H200,), 16, "everything"),
        steps=500_000,
        peak_lr=1.5e-4,
    )


@experiment
def llama31_8b(*, rows: int = 128, length: int = 8192, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Llama-3.1 8B, 1 M tokens a step in rows of 8,192, on v6e, v5e or v5p.

    Compiled for 16 v6e chips with a row each at once, 12 of 33.5 GB at the peak (docs/benchmarks/aot-experiments.md).
    Not trained.
    """
    return pretraining(
        llama("Llama-3.1-8B"),
        Documents(rows, length, data, seed),
        Fit((V5P, TPU7X), 4, "context", rows=4),
        Fit((V4, V6E), 16, "context"),
        Fit((V5E,), 32, "everything"),
        Fit((H100,), 8, "context"),
        Fit((H200,), 4, "context"),
        steps=500_000,
        peak_lr=3e-4,
    )


@experiment
def qwen25_32b(*, rows: int = 512, length: int = 8192, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Qwen2.5 32B, 4 M tokens a step in rows of 8,192, on v5p, v6e or v5e.

    Compiled for 128 v5p chips: 6.2 GB of arguments and 57 of temporary arrays a chip, of 102.8, estimated at 24 s
    (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        qwen("Qwen2.5-32B"),
        Documents(rows, length, data, seed),
        Fit((V5P, TPU7X), 16, "everything", rows=4, largest=16),
        Fit((V5P, TPU7X), 32, "context", rows=4),
        Fit((V4, V6E), 64, "everything"),
        Fit((V5E,), 128, "everything", rows=2, axes={"tensor": 4}),
        Fit((H100,), 32, "everything"),
        Fit((H200,), 8, "everything"),
        steps=100_000,
        peak_lr=1e-4,
    )


def _with_padding(model: Decoder.Config) -> Decoder.Config:
    """Return a mixture that routes padding too: rows of pretraining have next to none, and it costs no mask."""
    replace(model, MoE.Config, lambda cfg: cfg.set(route_padding=True))
    return model


@experiment
def qwen3_30b_a3b(*, rows: int = 1024, length: int = 4096, data: str = DATA, seed: int = 0) -> Trainer.Config:
    """Qwen3 30B-A3B (128 experts, of which a token uses 8), 4 M tokens a step, on v5p, v6e and others of their memory.

    Compiled for 64 v5p chips: a peak of 83 GB a chip, of 102.8; estimated at 8.5 s, 0.1 of it communication that
    overlaps nothing (docs/benchmarks/aot-experiments.md). Not trained here.
    """
    return pretraining(
        _with_padding(moe("Qwen3-30B-A3B")),
        Documents(rows, length, data, seed),
        # Without an axis `expert` devices gather experts: less than sending so many rows to them.
        Fit((V5P,), 16, None, rows=4, largest=32),
        Fit((V5P,), 64, None, rows=8),
        Fit((TPU7X,), 16, "everything", rows=2, axes={"expert": 8}),
        Fit((V6E,), 64, "everything", rows=4),
        Fit((V4,), 64, "everything", axes={"expert": 8}),
        Fit((H100,), 16, "everything", axes={"expert": 8}),
        Fit((H200,), 8, "everything", axes={"expert": 8}),
        steps=100_000,
        peak_lr=3e-4,
    )
