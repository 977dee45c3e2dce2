"""The small supervised job that `axl doctor` trains, and that compares stacks (docs/benchmarks/train-step.md)."""

from typing import Literal

import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input import SupervisedInput
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.trainer import Trainer
from models.dense import dense

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


def train_bench(
    *,
    batch: int = 8,
    length: int = 256,
    layers: int = 4,
    dim: int = 256,
    ffn: int = 1024,
    heads: int = 4,
    vocab: int = 1024,
    learning_rate: float = 1e-3,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Trainer.Config:
    """Decoder in Llama's shape, without an end, on rows of random tokens; nothing can be learnt."""
    model = dense(vocab_size=vocab, dim=dim, hidden=ffn, num_layers=layers, num_heads=heads, num_kv_heads=heads,
                  theta=10_000.0, eps=1e-6).set(remat="everything", dtype=dtype)  # fmt: skip
    source = RandomRows.Config(vocab_size=vocab, length=length, rows=4096)
    adam = AdamW.Config(b2=0.95, weight_decay=0.1)
    return Trainer.Config(
        model=model,
        input=SupervisedInput.Config(source=source, seq_len=length, batch_size=batch),
        learner=Learner.Config(optimizer=adam, schedule=Constant.Config(lr=learning_rate), clip_norm=1.0),
        checkpoint=Checkpointer.Config(save_every=NEVER),
        num_steps=NEVER,
        log_every=1,
    )
