"""The small rollout job: every completion of one GRPO step, with log-probabilities, and no update.

Policy, prompts and sizes are those of `GrpoJob`. A worker of this job holds an inference engine
and nothing else; one step of it is one generation of all completions.

Standard library only, and Python 3.11: peers import this file inside environments of their own,
as `rollout_job`, so it imports its neighbours for the type checker alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.bench.grpo_step.job import GrpoJob
    from tools.bench.harness.protocol import StepServer


@dataclass(frozen=True)
class Completions:
    """The result of one generation, as plain numbers on the host."""

    tokens: Sequence[Sequence[int]]  # ids, one row for each completion; completions of a prompt are consecutive
    logprobs: Sequence[Sequence[float]]  # logprobs of those tokens, under the distribution they were drawn from


def check(job: GrpoJob, completions: Completions) -> None:
    """Check that the work was done.

    Raises:
        ValueError: not all tokens are there, they are no tokens of the vocabulary, their
            log-probabilities are none, or the completions of a prompt are all the same.
    """
    for name, rows in (("tokens", completions.tokens), ("logprobs", completions.logprobs)):
        lengths = {len(row) for row in rows}
        if len(rows) != job.rollouts or lengths != {job.new_tokens}:
            raise ValueError(
                f"{name}: {len(rows)} rows of length {sorted(lengths)}; expected {job.rollouts} of {job.new_tokens}"
            )
    if not all(0 <= token < job.vocab for row in completions.tokens for token in row):
        raise ValueError(f"a token lies outside the vocabulary of {job.vocab}")
    if not all(-math.inf < value <= 0 for row in completions.logprobs for value in row):
        raise ValueError("a log-probability is positive or not finite")
    for first in range(0, job.rollouts, job.group):
        samples = completions.tokens[first : first + job.group]
        if job.group > 1 and len({tuple(row) for row in samples}) == 1:
            raise ValueError(f"all completions of prompt {first // job.group} are the same")


def serve(job: GrpoJob, server: StepServer, generate: Callable[[int], Completions]) -> None:
    """Generate once per request until the runner ends the worker.

    Args:
        generate: makes all completions of step `index`, done when it returns.
    """

    def step(index: int) -> None:
        completions = generate(index)
        check(job, completions)  # well under a thousandth of a step
        server.record(sum(len(row) for row in completions.tokens))

    server.serve(step)
