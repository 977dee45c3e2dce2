"""A source of problems that misbehave as told: they raise, take too long, or are long."""

from collections.abc import Iterator
from typing import Any, override

from rl.protocol.messages import Problem
from rl.tasks.heldout import is_heldout
from rl.tasks.source import ProblemSource


class Numbers(ProblemSource):
    """Item i asks "i"; `bad` numbers raise, `long` ones are asked with many words, `endless` ones never come."""

    class Config(ProblemSource.Config):
        bad: tuple[int, ...] = ()
        long: tuple[int, ...] = ()
        endless: tuple[int, ...] = ()

    def __init__(self, cfg: Config, *, seed: int):
        super().__init__(cfg)
        del seed
        self._cfg = cfg

    @override
    def candidates(self, turn: int) -> Iterator[int]:
        return iter(range(turn * 4, turn * 4 + 4))

    @override
    def heldout_candidates(self, wanted: int, heldout_every: int) -> Iterator[int]:
        return iter(range(1000))

    @override
    def is_heldout(self, problem: Problem, heldout_every: int) -> bool:
        return is_heldout(problem.question, heldout_every)

    @override
    def make(self, item: int, problem_id: int) -> Problem:
        if item in self._cfg.bad:
            raise AssertionError(f"{item} is bad")
        while item in self._cfg.endless:
            pass
        words = " word" * 20 if item in self._cfg.long else ""
        return Problem(problem_id, self.label, f"{item}{words}", str(item), {"answer": str(item)})

    @override
    def score(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])
