"""The common parts of pretraining runs: documents in, AdamW with warm-up and cosine, activations in bfloat16."""

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import ConfigBase, MeshRules
from axlearn_like.input import ArrayRecord, SupervisedInput, TokenIds, json_record
from axlearn_like.learner import AdamW, Learner, WarmupCosine
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.trainer import Trainer


def pretraining(
    model: ConfigBase,
    *,
    rows: int,
    length: int,
    steps: int,
    peak_lr: float,
    data: str,
    mesh_rules: MeshRules,
    seed: int,
) -> Trainer.Config:
    """A trainer of next tokens on packed documents.

    Args:
        model: a decoder.
        rows: rows of the global batch.
        length: tokens of a row; a longer document is cut.
        steps: updates in all; the first 2,000, or a tenth if that is less, warm up.
        peak_lr: the highest learning rate; it ends at a tenth of that.
        data: ArrayRecord files whose records are JSON objects with a list of token ids, `tokens`.
        mesh_rules: what changes with the devices.
        seed: seed of parameters and data order.
    """
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
        mesh_rules=mesh_rules,
        num_steps=steps,
        seed=seed,
    )
