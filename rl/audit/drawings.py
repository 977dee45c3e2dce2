"""Drawings of a rollout by several workers, and the terms by which they are compared."""

import dataclasses
from typing import NamedTuple

from rl.audit.comparison import Difference, Rounding, first_difference, reward_difference
from rl.protocol.messages import Prompt, Rollout, Score
from rl.rollout.request import draw_seed


@dataclasses.dataclass(frozen=True)
class AuditTerms:
    """Terms by which drawings of several classes of hardware are compared."""

    seed: int
    vocab: int
    cpu_bound: float  # limit of the difference of two log-probabilities that two CPUs give
    bound: float  # limit otherwise

    def difference(self, prompt: Prompt, one: "AuditedDraw", other: "AuditedDraw") -> Difference | None:
        """Return the first difference of two drawings, exactly for one class of hardware; None: there is none."""
        rounding = None
        if not one.hardware == other.hardware != "":
            cpus = all(drawing.hardware.startswith("cpu ") for drawing in (one, other))
            bound = self.cpu_bound if cpus else self.bound
            rounding = Rounding(bound, draw_seed(self.seed, prompt.draw), self.vocab)
        return first_difference(one.rollout, other.rollout, rounding) or reward_difference(one.score, other.score)


class AuditedDraw(NamedTuple):
    """A rollout as a worker has drawn it, with its score and the worker's class of hardware."""

    worker: str
    rollout: Rollout
    score: Score
    hardware: str
