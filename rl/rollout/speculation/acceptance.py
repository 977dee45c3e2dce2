"""The measured share of drafted tokens that are right, and how deep drafts should be by it."""

import dataclasses
import math

_UNLIKELY = 0.1  # a place that is reached with less than this probability is not drafted for


@dataclasses.dataclass(slots=True)
class Acceptance:
    """The measured acceptance of drafts; before anything is measured, two of three tokens are expected to be right."""

    accepted: float = 0.0  # drafted tokens, the latest dispatches weighing most
    missed: float = 0.0  # steps that ended with a wrong token, or had no draft
    refused: bool = False  # logits were not all numbers with a draft: the sequence goes on without

    def decay(self, weight: float) -> None:
        """Let what was measured before weigh so much less."""
        self.accepted, self.missed = weight * self.accepted, weight * self.missed

    @property
    def probability(self) -> float:
        """The share of drafted tokens that are right, of those behind right ones."""
        return (self.accepted + 2) / (self.accepted + self.missed + 3)

    @property
    def depth(self) -> int:
        """Places that are reached with some probability."""
        return max(1, math.ceil(math.log(_UNLIKELY) / math.log(self.probability)))

    def gain(self, depth: int) -> float:
        """Return the accepted tokens to be expected of a step."""
        p = self.probability
        return p * (1 - p**depth) / (1 - p)
