"""A paragraph of docs/benchmarks/train-step.md: host time of a call of the train step, without the device's time.

    python -m tests.studies.dispatch 8

prints one JSON object. The model is as small as possible, so that the host's part dominates; what the host
does depends on the number of arrays in the state, and a scanned stack has as many arrays at 64 layers as at 8.

The lowest values count: other work on the machine can make a call longer (three to five times, if it is busy)
and never shorter. A function of the same arrays that does nothing, called in turns with the step, shows JAX's part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from axlearn_like.layers.base import split
from axlearn_like.training.losses import make_supervised_loss
from axlearn_like.training.step import init_state, make_train_step
from mesh import make_mesh, shard_batch
from mesh.programs.compilation import enable_compilation_cache
from tests.peers.train_job import QUICK, TrainJob
from tests.studies.train_step.ours import trainer_config

CALLS = 200
WARM_UP = 20


def batch_of(job: TrainJob) -> dict[str, np.ndarray]:
    """Return a batch of zeros in the form that `SupervisedInput` makes."""
    shape = (job.batch, job.length)
    names = ("tokens", "targets", "positions", "segment_ids")
    return {name: np.zeros(shape, np.int32) for name in names} | {"weights": np.full(shape, 1 / job.tokens, np.float32)}


def measure(job: TrainJob, calls: int = CALLS) -> dict[str, float]:
    """Measure the CPU time of the calling thread, in microseconds, over calls that begin when the device is idle.

    Returns:
        `lowest` and `median` of a call of the jitted step, `nothing` (the lowest of a call with the same arrays in and
        out that computes nothing), `batch` (the lowest of putting a batch on the device), `arrays` (of the state).
    """
    cfg = trainer_config(job, "float32")
    learner = cfg.learner.build()
    graphdefs: list[nnx.GraphDef[Any]] = []

    def init(key: jax.Array) -> dict[str, Any]:
        graphdef, params = split(cfg.model.build(rngs=nnx.Rngs(key)))
        graphdefs.append(graphdef)
        return init_state(params, learner)

    with jax.set_mesh(make_mesh(cfg.mesh)):
        state = jax.jit(init)(jax.random.key(0))
        step = make_train_step(make_supervised_loss(graphdefs[0], cfg.loss.build()), learner)
        nothing = jax.jit(lambda state, batch: (jax.tree.map(lambda x: x + 1, state), batch), donate_argnums=0)
        host, rows = batch_of(job), []
        for _ in range(WARM_UP + calls):
            began = time.thread_time()
            batch = shard_batch(host)
            placed = time.thread_time() - began
            state, stepped = _timed(step, state, jax.block_until_ready(batch))
            state, idle = _timed(nothing, state, batch)
            rows.append((stepped, idle, placed))
    stepped, idle, placed = zip(*rows[WARM_UP:], strict=True)
    figures = {"lowest": min(stepped), "median": statistics.median(stepped), "nothing": min(idle), "batch": min(placed)}
    microseconds = {name: round(value * 1e6, 1) for name, value in figures.items()}
    return {**microseconds, "arrays": len(jax.tree.leaves(state))}


def _timed(function: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> tuple[Any, float]:
    """Return the new state when it is computed, and the CPU seconds of this thread until the call returned."""
    began = time.thread_time()
    state, other = function(state, batch)
    spent = time.thread_time() - began
    jax.block_until_ready((state, other))
    return state, spent


def main() -> None:
    """Print the result of `measure` at a number of layers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layers", type=int)
    parser.add_argument("--calls", type=int, default=CALLS)
    arguments = parser.parse_args()
    enable_compilation_cache()
    print(json.dumps(measure(dataclasses.replace(QUICK, layers=arguments.layers), arguments.calls)))


if __name__ == "__main__":
    main()
