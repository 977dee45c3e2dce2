"""A table of docs/benchmarks/rollout.md: decoding of a group's samples with and without shared keys.

    python -m tests.studies.cascade

Some prompts with 16 samples each, as long as an agent's or a few-shot prompt: one, and as many as fill the rows that an
engine by default. Two engines run the same requests in turn, one of them with `RolloutEngine.cascade`. Only decoding
is timed: the prompts are in the prefix cache of both before.

* `cpu_ratio`: CPU seconds per token with shared keys / without. `bytes_ratio`: keys (and values) that attention reads
  in a step / those that it would read if each row read its own, in whole blocks of keys, as they are read.
* `identical`: tokens, log-probabilities and finish reasons of both engines are equal to the bit, in all rounds.
* `first_cpu_s`: CPU seconds of a new engine's first answers to all requests, compilation and prefill included.
"""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from tests.studies.bed import Bed, Compilations
from tests.studies.speculation import same_rollouts, timed
from tools.bench.harness.protocol import now, use_one_core

SAMPLES = 16


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Measure the key `cascade`: an entry for each job; medians over rounds."""
    bed, compilations = Bed(quick=quick), Compilations()
    samples, new, rounds = (4, 8, 1) if quick else (SAMPLES, bed.job.new_tokens, 3)
    jobs, compiled = [], 0
    for groups, prompt in ((1, 64),) if quick else ((4, 1024), (1, 1024)):
        sizes: dict[str, Any] = {"max_num_seqs": groups * samples, "max_prompt_tokens": prompt, "max_new_tokens": new}
        plain, cascade = bed.engine(**sizes), bed.engine(**sizes, cascade=samples)
        sized: dict[str, Any] = {"prompt_tokens": prompt, "samples": samples}
        asked = [[bed.request(new, **sized) for _ in range(groups)] for _ in range(rounds)]
        first = [_first(engine, asked) for engine in (plain, cascade)]
        compilations.count = 0
        results = [_both(plain, cascade, requests) for requests in asked]
        compiled += compilations.count
        about = {"prompts": groups, "prompt_tokens": prompt}
        first_cpu_s = dict(zip(WAYS, first, strict=True))
        jobs.append({**about, **_summary(results, cascade), "first_cpu_s": first_cpu_s})
    about = {"samples": samples, "new_tokens": new, "rounds": rounds}
    return {"cascade": {**about, "jobs": jobs}, "warm_compiles": compiled}


WAYS = ("plain", "cascade")


def _first(engine: RolloutEngine, asked: Sequence[Sequence[Request]]) -> float:
    """Return the CPU seconds of the first answers: after them all is compiled, and the prompts are cached."""
    began = now()
    for _ in range(2):  # pages of prompts that are cached are copied by another program
        for requests in asked:
            engine.generate(list(requests))
    return now().since(began).cpu


def _both(plain: RolloutEngine, cascade: RolloutEngine, requests: list[Request]) -> dict[str, Any]:
    expected, alone = timed(plain, requests)
    found, shared = timed(cascade, requests)
    tokens = sum(len(one.tokens) for one in expected)
    return {
        "identical": same_rollouts(found, expected),
        "cpu_ratio": shared.cpu / alone.cpu,
        "cpu_us_per_token": {"plain": 1e6 * alone.cpu / tokens, "cascade": 1e6 * shared.cpu / tokens},
    }


def _summary(results: list[dict[str, Any]], cascade: RolloutEngine) -> dict[str, Any]:
    stats = cascade.stats()
    return {
        "cpu_ratio": statistics.median(one["cpu_ratio"] for one in results),
        "bytes_ratio": stats["cascade_keys_read"] / max(1, stats["cascade_keys_alone"]),
        "identical": all(one["identical"] for one in results),
        "cpu_us_per_token": {way: statistics.median(one["cpu_us_per_token"][way] for one in results) for way in WAYS},
    }


if __name__ == "__main__":
    use_one_core()  # before jax counts the cores
    print(json.dumps(measure()))
