"""A curriculum of task families: which are drawn, and how often, by how many of their new problems are solved.

Families stand in the mixture in the order in which they are learned. At first the first ones are open; once all open
ones are solved well enough, the next is *promoted*. An open family has the share of the batch that its weight gives it,
times how near its pass rate is to the target; one that is solved nearly always is *retired* to a small share, by which
it is seen when the policy forgets it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, override

from axlearn_like.config import ConfigBase, Configurable

__all__ = ["Curriculum", "FamilyRecord"]


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyRecord:
    """Results of a family's new problems, discounted: answers, right ones, groups, groups without a gradient."""

    answers: float = 0.0
    solved: float = 0.0
    groups: float = 0.0
    dead: float = 0.0

    def after(self, answers: int, solved: int, discount: float) -> Self:
        """Return the record with one more group."""
        kept = [discount * value for value in dataclasses.astuple(self)]
        more = (answers, solved, 1, float(solved in (0, answers)))
        return type(self)(*(old + new for old, new in zip(kept, more, strict=True)))

    @property
    def rate(self) -> float:
        """Mean of the share of right answers, before any were seen one half."""
        return (self.solved + 1) / (self.answers + 2)

    @property
    def dead_share(self) -> float:
        """Mean of the share of groups whose answers were all right or all wrong, before any were seen one half."""
        return (self.dead + 1) / (self.groups + 2)


class Curriculum(Configurable):
    """Rules of a curriculum, and the order of the families in a batch."""

    class Config(ConfigBase["Curriculum"]):
        target: float = 0.5  # pass rate of the families to draw most often
        open: int | None = None  # families that are drawn at first, in the mixture's order; None: all
        promote_at: float = 0.6  # the next family is opened when all open ones have this pass rate
        retire_at: float = 0.9  # pass rate from which a family has the least share
        least: float = 0.1  # least share of an open family, relative to its weight: its pass rate is still measured
        # Answers that a pass rate needs before it counts, discounted; until then a family is at the target.
        answers: float = 64.0

        @override
        def check_fields(self) -> None:
            for field in ("target", "promote_at", "retire_at"):
                self.require(field, 0 < getattr(self, field) <= 1, "more than 0, up to 1")
            self.require("least", 0 < self.least <= 1, "more than 0, up to 1")
            self.require("retire_at", self.retire_at > self.target, f"more than target={self.target:g}")
            self.require_least(1, "open")
            self.require_least(0, "answers")

    def __init__(self, cfg: Config, *, weights: Sequence[float]):
        """Take the weights of the mixture's families; those of weight 0 are never drawn."""
        self.cfg, self._weights = cfg, list(weights)
        self._drawn = [family for family, weight in enumerate(weights) if weight > 0]

    def begin(self) -> dict[str, Any]:
        """Return the state before the first step: how many families are open, and what each is owed in the order."""
        first = len(self._drawn) if self.cfg.open is None else min(self.cfg.open, len(self._drawn))
        return {"open": first, "owed": [0.0] * len(self._weights)}

    def after(self, state: dict[str, Any], records: Sequence[FamilyRecord]) -> dict[str, Any]:
        """Return the state once a step is consumed: the next family may be open."""
        known = [records[family] for family in self._drawn[: state["open"]]]
        ready = all(one.answers >= self.cfg.answers and one.rate >= self.cfg.promote_at for one in known)
        return {**state, "open": min(state["open"] + ready, len(self._drawn))}

    def shares(self, state: dict[str, Any], records: Sequence[FamilyRecord]) -> list[float]:
        """Return the share of each family in a batch; their sum is 1."""
        wanted = [0.0] * len(self._weights)
        for family in self._drawn[: state["open"]]:
            wanted[family] = self._weights[family] * self._use(records[family])
        return [one / sum(wanted) for one in wanted]

    def order(self, state: dict[str, Any], shares: Sequence[float], places: int) -> tuple[list[int], dict[str, Any]]:
        """Return the families of so many places, by smooth weighted round robin, and the state after them."""
        owed: list[float] = list(state["owed"])
        families: list[int] = []
        for _ in range(places):
            owed = [held + share for held, share in zip(owed, shares, strict=True)]
            family = max((number for number, share in enumerate(shares) if share), key=lambda number: owed[number])
            owed[family] -= 1.0
            families.append(family)
        return families, {**state, "owed": owed}

    def _use(self, record: FamilyRecord) -> float:
        """Return how useful a family is: 1 at the target, and `least` where all is right, or all wrong."""
        cfg = self.cfg
        if record.answers < cfg.answers:
            return 1.0
        if record.rate >= cfg.retire_at:
            return cfg.least
        far = abs(record.rate - cfg.target) / max(cfg.target, 1 - cfg.target)
        return max(cfg.least, 1 - far)
