"""A table of docs/benchmarks/rollout.md: decoding of a long tail with and without drafts from sibling samples.

    python -m tests.studies.speculation

The job is a worker's last groups: some prompts with several samples each, whose lengths are log-normal and clipped, by
a policy that has learnt a language of phrases (`phrases.py`): siblings have long parts in common, and part where the
policy draws. Two engines run the same requests in turn, one of them with drafts; each round has prompts of its own.

* `cpu_ratio`: CPU seconds per token with drafts / without, of the first answers to their prompts: drafts come from
  siblings and from each sequence's own text. `again`: the same prompts with another seed, as in a next epoch, when the
  first answers are known.
* `identical_tokens`: tokens, log-probabilities and finish reasons of both engines are equal to the bit, in all rounds.
* `accepted_per_step`: drafted tokens that a step with drafts accepts, in all its rows; `acceptance`: of those drafted.
"""

import dataclasses
import json
import statistics
from collections.abc import Generator
from typing import Any

import numpy as np

from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.commands import Generate
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.rollout.speculation.speculator import Speculation
from tests.studies.bed import Bed, after_warm_up
from tests.studies.phrases import Language, trained
from tools.bench.harness.protocol import Clock, now, use_one_core


@dataclasses.dataclass(frozen=True)
class Tail:
    """The distribution of completion lengths, in tokens: log-normal and clipped."""

    median: float = 96.0
    sigma: float = 1.0  # standard deviation of the logarithm
    shortest: int = 16
    longest: int = 512
    requests: int = 256
    seed: int = 0

    def lengths(self) -> list[int]:
        """Return the lengths in order of arrival."""
        drawn = np.random.default_rng(self.seed).lognormal(np.log(self.median), self.sigma, self.requests)
        return np.clip(np.rint(drawn), self.shortest, self.longest).astype(int).tolist()


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Measure the key `speculation`; medians over rounds."""
    bed, language = Bed(quick=quick), Language()
    tail = Tail(median=8, shortest=4, longest=24) if quick else Tail()
    prompts, samples = (2, 2) if quick else (2, 8)
    params, loss = trained(bed, language, steps=2 if quick else 120, length=32 if quick else 384)
    sizes = {
        "max_num_seqs": prompts * samples,
        "max_prompt_tokens": bed.job.prompt_tokens,
        "max_new_tokens": tail.longest,
    }
    plain = bed.engine(**sizes, params=params)
    drafting = bed.engine(**sizes, params=params, speculation=Speculation.Config())
    lengths = dataclasses.replace(tail, requests=prompts * samples).lengths()

    def run() -> dict[str, Any]:
        asked = [_group(bed, lengths[index * samples :][:samples]) for index in range(prompts)]
        again = [dataclasses.replace(request, seed=request.seed + 1) for request in asked]
        first = _both(plain, drafting, asked)
        return {**first, "again": _both(plain, drafting, again)}

    rounds, compiled = after_warm_up(1 if quick else 3, run)
    identical = all(one["identical"] and one["again"]["identical"] for one in rounds)
    figures = {**_medians(rounds), "again": _medians([one["again"] for one in rounds])}
    about = {
        "prompts": prompts,
        "samples": samples,
        "tokens": sum(lengths),
        "longest": max(lengths),
        "policy_loss": loss,
    }
    return {"speculation": {**about, **figures, "identical_tokens": identical}, "warm_compiles": compiled}


def _group(bed: Bed, lengths: list[int]) -> Request:
    """Return a request whose samples have these lengths."""

    def loop(completion: Any) -> Generator[Generate, Any, None]:
        yield Generate(max_new_tokens=lengths[completion.sample])

    return bed.request(max(lengths), prompt_tokens=bed.job.prompt_tokens, samples=len(lengths), agent_loop=loop)


def _both(plain: RolloutEngine, drafting: RolloutEngine, asked: list[Request]) -> dict[str, Any]:
    """Return the figures of one round of the same requests on both engines."""
    expected, spent = timed(plain, asked)
    before = drafting.stats()
    found, less = timed(drafting, asked)
    counts = {name: value - before[name] for name, value in drafting.stats().items() if name in before}
    tokens = sum(len(one.tokens) for one in expected)
    return {
        "identical": same_rollouts(found, expected),
        "cpu_ratio": less.cpu / spent.cpu,
        "wall_ratio": less.wall / spent.wall,
        "plain_cpu_us_per_token": 1e6 * spent.cpu / tokens,
        "cpu_us_per_token": 1e6 * less.cpu / tokens,
        "accepted_share": counts["accepted_tokens"] / tokens,
        "acceptance": counts["accepted_tokens"] / max(1, counts["drafted_tokens"]),
        "accepted_per_step": counts["accepted_tokens"] / max(1, counts["draft_steps"]),
        "dispatches": counts["dispatches"],
        "draft_dispatches": counts["draft_dispatches"],
    }


def timed(engine: RolloutEngine, asked: list[Request]) -> tuple[list[Rollout], Clock]:
    """Return the rollouts of requests, and the time that they took."""
    began = now()
    return engine.generate(asked), now().since(began)


def same_rollouts(found: list[Rollout], expected: list[Rollout]) -> bool:
    """Return True if tokens, log-probabilities and finish reasons are equal to the bit."""
    return all(
        a.finish_reason == b.finish_reason
        and np.array_equal(a.tokens, b.tokens)
        and a.logprobs.tobytes() == b.logprobs.tobytes()
        for a, b in zip(found, expected, strict=True)
    )


def _medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name in rounds[0] if name not in ("identical", "again")]
    return {name: statistics.median(one[name] for one in rounds) for name in names}


if __name__ == "__main__":
    use_one_core()  # before jax counts the cores
    print(json.dumps(measure()))
