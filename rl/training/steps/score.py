"""Second step: what is learned from which rollout, and the rollouts of this process's rows."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from axlearn_like.training.step import State
from mesh.batches import local_rows
from rl.objective import Objective
from rl.protocol.headers import GroupHeader
from rl.protocol.messages import RolloutData
from rl.training.batching import Arranged, Layout, arrange
from rl.training.critic.values import RolloutValues
from rl.training.scoring.logprob_diff import LogprobDiff
from rl.training.scoring.reference_scores import ReferenceScores
from rl.training.steps.take import AgreedBatch, RolloutIndex, TakeStep
from rl.training.updates import Updates


class ScoredBatch(NamedTuple):
    """A batch that is placed in rows."""

    step: int  # number of the batch, and version of the policy that is updated by it
    headers: list[GroupHeader]
    contents: RolloutData  # rollouts that this process needs, at least
    scores: dict[str, np.ndarray]  # "divergence", "values": numbers of whole rollouts that the objective has used
    arranged: Arranged


@dataclasses.dataclass(frozen=True)
class ScoreStep:
    """Advantages and weights by the objective, from rewards, divergence from the reference and a critic's values."""

    take: TakeStep  # fetches rollouts too
    objective: Objective
    layout: Layout
    diff: LogprobDiff  # scores whole rollouts
    correct_threshold: float = 1.0  # reward from which on a rollout is right, for metrics
    updates: Updates | None = None  # several by each batch; None: one
    reference: ReferenceScores | None = None  # policy that the objective compares with; None: with none
    critic: RolloutValues | None = None  # critic of the objective's advantage; None: it has none

    def __call__(self, agreed: AgreedBatch, state: State, others: Sequence[RolloutIndex]) -> ScoredBatch | None:
        """Return the batch in its rows, with their rollouts and `others`; None if a process cannot get its own."""
        step, headers = agreed.step, agreed.headers
        if (scores := self._of_rollouts(agreed, state)) is None:
            return None
        parts = None if self.updates is None else partial(self.updates.parts, version=step)
        given = {**scores, "correct_threshold": self.correct_threshold}
        arranged = arrange(headers, self.objective, self.layout, parts=parts, **given)
        contents = self.take.contents(agreed, [*local_rollouts(arranged), *others])
        return None if contents is None else ScoredBatch(step, headers, contents, scores, arranged)

    def _of_rollouts(self, agreed: AgreedBatch, state: State) -> dict[str, np.ndarray] | None:
        """Return what the objective needs of each whole rollout; None if a process cannot get its rollouts."""
        diverged, valued = self.objective.needs_divergence, self.objective.needs_values
        if not diverged and not valued:
            return {}
        compared = self.diff.rows(agreed.headers) if diverged else []
        learned = [] if self.critic is None else self.critic.rows(agreed.headers)
        if (contents := self.take.contents(agreed, [*compared, *learned])) is None:
            return None
        scores: dict[str, np.ndarray] = {}
        if diverged:
            assert self.reference is not None, "a term against a reference is refused without one"
            score = self.reference.of_update(state["params"], agreed.step).rollouts
            scores["divergence"] = self.diff.divergence(agreed.headers, contents, score)
        if valued:
            assert self.critic is not None, "built with the advantage"
            scores["values"] = self.critic.values(agreed.headers, contents, state)
        return scores


def local_rollouts(arranged: Arranged) -> Iterator[RolloutIndex]:
    """Return the rollouts in the rows of this process."""
    for microbatch in arranged.microbatches:
        for row in local_rows(len(microbatch.rows)):
            for g, rollouts in microbatch.rows[row]:
                yield from ((g, n) for n in rollouts)
