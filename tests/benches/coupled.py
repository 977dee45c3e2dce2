"""`axl bench rollout --sections coupled`: an evaluation some updates later, drafted from the earlier one's rollouts.

A policy is supervised and then trained by RL. Held-out problems are answered at a base version, and some updates later
again with the same keys: without drafts, and with those rollouts as drafts. Everything counts, prompts too. Two jobs:
long answers by few rows of a larger policy, whose decoding is bound by reading weights as an accelerator's is, and the
evaluation of `axl rl demo` as it is, whose decoding on a CPU is bound by products and whose answers are short.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from axlearn_like.config import set_path, to_text
from axlearn_like.run.directory import RunDirectory
from experiments.demo.config import demo
from mesh import make_mesh
from rl.experiment import RLExperiment
from rl.parameter_server.client import connect_local
from rl.protocol.messages import Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.tasks.prompts import PromptMaker
from rl.training.spec import TrainerServices
from rl.training.warm_start import open_warm_start, run_warm_start
from tests.benches.long_answers import counted_sums
from tools.bench.harness.interleave import Say
from tools.bench.harness.protocol import now

MAIN = 10  # updates between the two evaluations whose ratio is the result


@dataclasses.dataclass(frozen=True)
class Job:
    """An evaluation."""

    experiment: RLExperiment.Config
    rows: int  # sequences that the engine draws at a time
    problems: int
    distances: tuple[int, ...]  # updates between two evaluations


def measure(say: Say, *, rounds: int, quick: bool) -> dict[str, Any]:
    """Return the figures of both jobs: those of long answers, and under `demo` those of the demo."""
    long, short = counted_sums(), demo(steps=40).set(evaluation=None)  # warm-up of the learning rate takes 20
    if quick:
        for experiment in (long, short):
            set_path(experiment, "warm_start.num_steps", 4)
        jobs = Job(long, 2, 2, (1,)), Job(short, 128, 2, (1,))
    else:
        jobs = Job(long, 4, 12, (1, 2, 5, MAIN)), Job(short, 128, 96, (1, 2, 5, MAIN, 20))
    long_answers, of_demo = (_figures(job, say, rounds) for job in jobs)
    identical = long_answers.pop("identical") and of_demo.pop("identical")
    return {**long_answers, "identical_tokens": identical, "demo": of_demo}


def _figures(job: Job, say: Say, rounds: int) -> dict[str, Any]:
    """Return the figures of a job at all distances."""
    cfg, main = job.experiment, min(MAIN, job.distances[-1])
    with jax.set_mesh(make_mesh()):
        experiment, weights = trained(cfg, (0, *job.distances), say)
        requests = heldout_requests(experiment, job.problems, cfg.samples_per_prompt)
        engine = cfg.clone(engine=cfg.engine.clone(max_num_seqs=job.rows)).build().make_engine()
        by_distance: dict[int, dict[str, Any]] = {}
        for distance in job.distances:
            turns = rounds if distance == main else 1
            found = by_distance[distance] = _again(engine, weights, distance, requests, turns)
            say(f"{distance} updates later: {found}")
    return {
        "updates": main,
        "cpu_ratio": by_distance[main]["cpu_ratio"],
        "rows": job.rows,
        "rollouts": len(requests) * cfg.samples_per_prompt,
        "identical": all(found.pop("identical") for found in by_distance.values()),
        "by_updates": {str(distance): found for distance, found in by_distance.items()},
    }


def trained(cfg: RLExperiment.Config, versions: Sequence[int], say: Say) -> tuple[RLExperiment, dict[int, Any]]:
    """Supervise the policy and update it by RL; returns copies of its weights at these versions."""
    experiment, found = cfg.build(), dict[int, Any]()
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.open(Path(folder) / "run", to_text(cfg))
        say("supervising the policy")
        with open_warm_start(cfg.warm_start, run):
            run_warm_start(cfg.warm_start, run, lambda: False)
        say(f"{max(versions)} updates by RL")
        controller, weights = experiment.make_controller(run), connect_local(experiment.make_parameter_server())
        with experiment.make_verifier() as verifier:
            trainer = experiment.make_trainer(run, TrainerServices(controller, weights))
            worker = experiment.make_worker("worker-0", run, controller, weights, verifier)
            with trainer:
                trainer.start()
                while True:
                    if trainer.step in versions:
                        found.setdefault(trainer.step, jax.tree.map(np.array, trainer.state["params"]))
                    if trainer.step >= max(versions):
                        break
                    while worker.run_once():
                        pass
                    if trainer.run_once():
                        trainer.settle()
                trainer.close()
            worker.close()
    return experiment, found


def heldout_requests(experiment: RLExperiment, problems: int, samples: int) -> list[Request]:
    """Return held-out problems as an evaluation asks them."""
    cfg = experiment.cfg
    maker = PromptMaker(experiment.tokenizer, max_prompt_tokens=cfg.max_prompt_tokens)
    return [Request(maker.prompt(problem), samples, seed=0) for problem in cfg.tasks.build().heldout(problems)]


def _again(
    engine: RolloutEngine, weights: dict[int, Any], distance: int, requests: list[Request], rounds: int
) -> dict[str, Any]:
    """Return the figures of the requests so many updates after the base, with and without drafts, in turn."""
    engine.set_weights(weights[0], 0, rewind=True)
    base, count = engine.generate(requests), requests[0].samples
    engine.set_weights(weights[distance], distance, rewind=True)
    drafted = [
        dataclasses.replace(one, earlier=tuple(rollout.tokens for rollout in base[index * count :][:count]))
        for index, one in enumerate(requests)
    ]
    expected = engine.generate(requests)
    # Twice: the first compiles what it uses and measures decoding, by which the second has other dispatches.
    identical = all(_same(engine.generate(drafted), expected) for _ in range(2))
    tokens = sum(len(one.tokens) for one in expected)
    seconds: list[tuple[float, float]] = []
    before = dict(engine.earlier.counts)
    for _ in range(rounds):
        (expected, plain), (found, less) = _timed(engine, requests), _timed(engine, drafted)
        identical &= _same(found, expected)
        seconds.append((plain, less))
    counts = {name: (value - before[name]) / rounds for name, value in engine.earlier.counts.items()}
    pairs = list(zip(base, expected, strict=True))
    return {
        "cpu_ratio": round(statistics.median(less / plain for plain, less in seconds), 3),
        "identical": identical,
        "plain_cpu_us_per_token": round(1e6 * statistics.median(plain for plain, _ in seconds) / tokens, 1),
        "tokens": tokens,
        "same_rollouts": round(float(np.mean([a.tokens.tobytes() == b.tokens.tobytes() for a, b in pairs])), 4),
        "same_tokens": round(sum(_agreement(a, b) for a, b in pairs) / tokens, 4),
        "accepted_share": round(counts["coupled_accepted_tokens"] / tokens, 4),
        "acceptance": round(counts["coupled_accepted_tokens"] / max(1, counts["coupled_drafted_tokens"]), 4),
    }


def _timed(engine: RolloutEngine, requests: list[Request]) -> tuple[list[Rollout], float]:
    """Return the rollouts, and the CPU seconds that they took."""
    began = now()
    return engine.generate(requests), now().since(began).cpu


def _agreement(first: Rollout, second: Rollout) -> int:
    """Return the number of tokens before the first that differs."""
    size = min(len(first.tokens), len(second.tokens))
    differs = np.flatnonzero(first.tokens[:size] != second.tokens[:size])
    return int(differs[0]) if len(differs) else size


def _same(found: list[Rollout], expected: list[Rollout]) -> bool:
    """Return True if tokens and log-probabilities are equal to the bit."""
    return all(
        a.tokens.tobytes() == b.tokens.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()
        for a, b in zip(found, expected, strict=True)
    )
