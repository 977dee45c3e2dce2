"""A trainer small enough for tests, in this process or in one that is going to be killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.learner import AdamW, Learner, WarmupCosine
from axlearn_like.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
VOCAB = 32


class Counting(Configurable):
    """Examples that count upwards from random numbers; the first token of each is not learned."""

    class Config(ConfigBase["Counting"]):
        examples: int = 23
        max_length: int = 12

    def __init__(self, cfg: Config):
        rng = np.random.default_rng(7)
        self._lengths = rng.integers(3, cfg.max_length + 1, cfg.examples)
        self._starts = rng.integers(0, VOCAB, cfg.examples)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = (self._starts[index] + np.arange(self._lengths[index])) % VOCAB
        return {"tokens": tokens.astype(np.int32), "loss_mask": np.arange(len(tokens)) > 0}


class Preemption(Configurable):
    """An evaluator that sends the signal $TINY_SIGNAL to its own process at step $TINY_STEP.

    Before that it waits for the file $TINY_AWAIT, if any: for what is written in the background.
    These are not in the config because a resumed run must have the config of the killed one.
    """

    class Config(ConfigBase["Preemption"]):
        every: int = 1

    def __init__(self, cfg: Config, *, graphdef: Any, loss: Any):
        del graphdef, loss
        self.every, self.averaged = cfg.every, False

    def run(self, params: Any, step: int) -> dict[str, float]:
        del params
        if step == int(os.environ.get("TINY_STEP", "-1")):
            while not os.path.exists(os.environ["TINY_AWAIT"]):
                time.sleep(0.01)
            os.kill(os.getpid(), int(os.environ["TINY_SIGNAL"]))
        return {}


def tiny_model() -> Decoder.Config:
    block = Block.Config(attention=Attention.Config(num_heads=2), feed_forward=SwiGLU.Config(hidden=24))
    return Decoder.Config(vocab_size=VOCAB, dim=16, num_layers=2, block=block)


def tiny_trainer(num_steps: int, **changes: Any) -> Trainer.Config:
    cfg = Trainer.Config(
        model=tiny_model(),
        input=SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=8, seed=1),
        learner=Learner.Config(
            optimizer=AdamW.Config(weight_decay=0.1),
            schedule=WarmupCosine.Config(peak_lr=1e-2, warmup_steps=3, total_steps=40),
        ),
        checkpoint=Checkpointer.Config(save_every=4, keep=2),
        evaluators=(Preemption.Config(),),
        num_steps=num_steps,
        log_every=1,
        seed=3,
    )
    return cfg.set(**changes)


def run_and_print(run_dir: str, num_steps: int) -> None:
    """Train and print the result as JSON; runs in the child process of `run_in_process`."""
    print(json.dumps(tiny_trainer(num_steps).build().run(run_dir, progress=False)))


def run_in_process(
    run_dir: Path, num_steps: int, *, step: int = -1, signum: int = 0, wait_for: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """The tiny run in a process that is sent `signum` at `step`, once `wait_for` exists."""
    code = "import sys; from tests.axlearn_like.tiny import run_and_print as r; "
    code += "r(sys.argv[1], int(sys.argv[2]))"
    return subprocess.run(
        [sys.executable, "-c", code, str(run_dir), str(num_steps)],
        cwd=ROOT,
        env={
            **os.environ,
            "TINY_STEP": str(step),
            "TINY_SIGNAL": str(int(signum)),
            "TINY_AWAIT": str(wait_for),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
