"""A worker of our trainer: an experiment for `axl train`, held between steps by an evaluator.

    axl train tests.studies.train_step.ours:float32

runs it as users run theirs: command line, config, input, the Trainer's own loop, and metrics on disk at every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.layers.base import Params
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.trainer import Trainer
from tests.peers.train_job import QUICK, TrainJob
from tools.bench.doctor.supervised import train_bench
from tools.bench.harness.circumstances import system_version
from tools.bench.harness.protocol import StepServer


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


def trainer_config(job: TrainJob, dtype: Literal["float32", "bfloat16"]) -> Trainer.Config:
    """Return the job as an experiment, whose other settings are those of every job."""
    sizes = {name: getattr(job, name) for name in ("batch", "length", "layers", "dim", "ffn", "heads", "vocab")}
    return train_bench(**sizes, learning_rate=job.learning_rate, dtype=dtype)


def held(job: TrainJob, name: str, dtype: Literal["float32", "bfloat16"]) -> Trainer.Config:
    """Return the job as the experiment of this name, with the usual run directory, held after each step."""
    return trainer_config(job, dtype).set(evaluators=(EachStep.Config(run=f"runs/{name}"),))


def float32() -> Trainer.Config:
    """Return the job of the benchmark train_step."""
    return held(TrainJob(), "float32", "float32")


def bfloat16() -> Trainer.Config:
    """Return the same with activations in bfloat16."""
    return held(TrainJob(), "bfloat16", "bfloat16")


def float32_quick() -> Trainer.Config:
    """Return a tiny version of the job, as a smoke test."""
    return held(QUICK, "float32_quick", "float32")


def bfloat16_quick() -> Trainer.Config:
    """Return the tiny version with activations in bfloat16."""
    return held(QUICK, "bfloat16_quick", "bfloat16")
