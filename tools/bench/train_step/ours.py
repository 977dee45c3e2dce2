"""A benchmark worker for our trainer: an experiment for `axl train`, held between steps by an evaluator.

    axl train tools.bench.train_step.ours:float32

runs it as users run theirs: command line, config, input, the Trainer's own loop, and metrics on disk at every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import Params
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.trainer import Trainer
from tools.bench.harness.circumstances import system_version
from tools.bench.harness.protocol import StepServer
from tools.bench.train_step.job import QUICK, TrainJob

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


class EachStep(Configurable):
    """An evaluator that measures nothing: it waits until a step has ended, reports it, and waits for the next request.

    The reported loss is that of the previous step, the last on disk; `losses` are all up to it.
    """

    class Config(ConfigBase["EachStep"]):
        every: int = 1
        run: str = REQUIRED  # the run directory

    def __init__(self, cfg: Config, *, graphdef: nnx.GraphDef[Any], loss: Any):
        del graphdef, loss
        self.every, self.averaged = cfg.every, False
        self._server = StepServer(system_version(), parameters=0)
        self._metrics = Path(cfg.run) / "metrics.jsonl"

    def run(self, params: Params, step: int) -> dict[str, float]:
        """Report the step and return no scalars; exit the process when no more steps are requested."""
        jax.block_until_ready(params)
        if step == 1:
            self._server.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        else:
            losses = [row["loss"] for row in read_rows(self._metrics)]
            self._server.note(loss=losses[-1], losses=losses)
        if not self._server.step_done():
            raise SystemExit
        return {}


def trainer_config(job: TrainJob, name: str, dtype: Literal["float32", "bfloat16"]) -> Trainer.Config:
    """Return the job as the experiment of this name, with the usual run directory."""
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
        evaluators=(EachStep.Config(run=f"runs/{name}"),),
        seed=job.seed,
    )


def float32() -> Trainer.Config:
    """Return the job of the benchmark train_step."""
    return trainer_config(TrainJob(), "float32", "float32")


def bfloat16() -> Trainer.Config:
    """Return the same with activations in bfloat16."""
    return trainer_config(TrainJob(), "bfloat16", "bfloat16")


def float32_quick() -> Trainer.Config:
    """Return a tiny version of the job, as a smoke test."""
    return trainer_config(QUICK, "float32_quick", "float32")


def bfloat16_quick() -> Trainer.Config:
    """Return the tiny version with activations in bfloat16."""
    return trainer_config(QUICK, "bfloat16_quick", "bfloat16")
