"""The small supervised job as an experiment of ours."""

from __future__ import annotations

from typing import Literal

import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.trainer import Trainer
from tools.bench.train_step.job import TrainJob

NEVER = 10**9  # steps


class RandomRows(Configurable):
    """A source of random tokens; each example fills a row of the batch."""

    class Config(ConfigBase["RandomRows"]):
        vocab_size: int = REQUIRED
        length: int = REQUIRED
        rows: int = REQUIRED
        seed: int = 0

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def __len__(self) -> int:
        return self._cfg.rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        cfg = self._cfg
        tokens = np.random.default_rng((cfg.seed, index)).integers(0, cfg.vocab_size, cfg.length + 1, dtype=np.int32)
        return {"tokens": tokens, "loss_mask": np.ones(cfg.length + 1, bool)}


def trainer_config(job: TrainJob, dtype: Literal["float32", "bfloat16"]) -> Trainer.Config:
    """Return the job as an experiment, which has no end."""
    attention = Attention.Config(num_heads=job.heads, rope=Rope.Config(theta=job.rope_theta))
    norm = RMSNorm.Config(eps=job.norm_eps)
    model = Decoder.Config(
        vocab_size=job.vocab,
        dim=job.dim,
        num_layers=job.layers,
        block=Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=job.ffn), norm=norm),
        norm=norm,
        head=Head.Config(),
        remat="everything",
        dtype=dtype,
    )
    source = RandomRows.Config(vocab_size=job.vocab, length=job.length, rows=job.examples, seed=job.seed)
    adam = AdamW.Config(b1=job.b1, b2=job.b2, eps=job.eps, weight_decay=job.weight_decay)
    return Trainer.Config(
        model=model,
        input=SupervisedInput.Config(source=source, seq_len=job.length, batch_size=job.batch),
        learner=Learner.Config(optimizer=adam, schedule=Constant.Config(lr=job.learning_rate), clip_norm=job.clip),
        checkpoint=Checkpointer.Config(save_every=NEVER),
        num_steps=NEVER,
        log_every=1,
        seed=job.seed,
    )
