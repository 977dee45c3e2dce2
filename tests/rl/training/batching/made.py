"""Scored groups from which the tests of batching make updates."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl.objective import Objective
from rl.protocol.messages import Episode, Group, Score, Turn
from rl.training.batching import Batch
from tests.rl.tiny import make_group, make_prompt
from tests.rl.training.whole_groups import pack_groups

MAX_PROMPT, MAX_NEW = 6, 5
SIZES = (3, 5, 7)


def group(number: int, rewards: Sequence[float], lengths: Sequence[int], prompt_length: int = 4) -> Group:
    rng = np.random.default_rng(number)
    prompt = make_prompt(number, prompt_length, family="even" if number % 2 == 0 else "odd")
    made = make_group(prompt, [rng.integers(0, 264, length) for length in lengths], rewards)
    rollouts = tuple(
        dataclasses.replace(r, logprobs=-rng.random(len(r.tokens)).astype(np.float32)) for r in made.rollouts
    )
    return dataclasses.replace(made, rollouts=rollouts)


GROUPS = [
    group(0, [1.0, 0.0], [3, 5]),
    group(1, [0.0, 0.0], [5, 5], prompt_length=6),
    group(2, [0.5, 1.0], [1, 4], prompt_length=1),
]
EPISODES = (
    Episode((Turn(1, 1.0), Turn(3, 0.0)), figures=(("tool_calls", 2.0), ("tool_seconds", 0.5))),
    Episode((Turn(2, 0.0), Turn(5, 1.0)), ended="truncated", figures=(("tool_calls", 1.0), ("tool_seconds", 0.1))),
)


def pack(groups: Sequence[Group], objective: Objective | None = None, row_multiple: int = 1) -> Batch:
    made = objective or Objective.Config(old_policy="current").build()
    return pack_groups(groups, made, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, row_multiple=row_multiple)[0]


def played() -> Group:
    """Return the first group as episodes of equal sums, of which the turns differ."""
    rollouts = zip(GROUPS[0].rollouts, EPISODES, strict=True)
    scores = (Score(1.0), Score(1.0))
    return dataclasses.replace(
        GROUPS[0], rollouts=tuple(dataclasses.replace(r, episode=e) for r, e in rollouts), scores=scores
    )


def ragged(failed: bool) -> list[Group]:
    """Groups of 3, 5 and 7 rollouts; of 7 each, of which the verifier failed on all others, if `failed`."""
    rng, made = np.random.default_rng(3), []
    for number, size in enumerate(SIZES):
        one = group(number, rng.random(7).round(2).tolist(), [int(x) for x in rng.integers(1, MAX_NEW + 1, 7)])
        scores = tuple(s if n < size else Score(0.0, "crash") for n, s in enumerate(one.scores))
        kept = 7 if failed else size
        made.append(dataclasses.replace(one, rollouts=one.rollouts[:kept], scores=scores[:kept]))
    return made
