"""A source of problems: what a mixture mixes, such as a procedural family or the rows of a file."""

import abc
from collections.abc import Iterator
from typing import Any, override

from axlearn_like.config import ConfigBase, Configurable
from rl.protocol.messages import Problem


class ProblemSource(Configurable, abc.ABC):
    """Items by number, of which some are trained on and others are held out.

    Everything is a pure function of the config and the mixture's seed: any process that builds the same config sees the
    same items.
    """

    # Config of the environment that its problems are solved in; None: they are answered at once
    environment: Any = None

    class Config(ConfigBase["ProblemSource"]):
        weight: float = 1.0  # share of the training problems, relative to the other sources; 0: held-out only
        label: str | None = None  # name in metrics; None: the source's own

        @property
        def title(self) -> str:
            """Return the name in metrics, which is unique in a mixture."""
            return self.label or type(self).__qualname__.partition(".")[0]

        @override
        def check_fields(self) -> None:
            self.require_least(0, "weight")

    def __init__(self, cfg: Config):
        self.label, self.weight = cfg.title, cfg.weight

    @abc.abstractmethod
    def candidates(self, turn: int) -> Iterator[int]:
        """Yield the items for training problem `turn` of this source: the first that can be used is taken."""

    @abc.abstractmethod
    def make(self, item: int, problem_id: int) -> Problem:
        """Return an item as a problem with this id. May raise: then it is left out."""

    @abc.abstractmethod
    def heldout_candidates(self, wanted: int, heldout_every: int) -> Iterator[int]:
        """Yield the items among which to look for so many held-out problems."""

    @abc.abstractmethod
    def is_heldout(self, problem: Problem, heldout_every: int) -> bool:
        """Return True if a problem is held out: never trained on."""

    @abc.abstractmethod
    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Return the score of an answer to an item, in 0..1. May raise on what it cannot parse."""

    def canonical(self, item: int) -> int:
        """Return the first of the items that are the same problem."""
        return item

    @property
    def heldout_size(self) -> int | None:
        """Return how many items are held out at most; None: any number."""
        return None

    def vote(self, answer: str) -> str:
        """Return the part of an answer that answers must share to be one vote of a majority; "": it abstains."""
        return answer.strip()

    def form(self, answer: str) -> str | None:
        """Return the form in which an answer gives what is scored, "none" if in no readable one; None: not told."""
        del answer

    def split(self, heldout_every: int) -> None:
        """Set the split by text, for sources that divide their items by it beforehand."""

    def problem(self, item: int, problem_id: int) -> Problem:
        """Return an item as the policy is asked it: as it is made, and then as its environment prepares it."""
        problem = self.make(item, problem_id)
        return problem if self.environment is None else self.environment.prepare(problem)

    @property
    def digest(self) -> str:
        """A checksum of data that is not in the config: a run resumes only with what it began with."""
        return ""

    @property
    def widen(self) -> str:
        """Return what a user may do who needs more problems."""
        return "widen its params"

    @property
    def has_answers(self) -> bool:
        """True if problems have reference answers that score 1."""
        return True
