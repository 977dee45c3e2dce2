"""The prompt pool: the problems of each step, some of them drawn before, by how often they were solved then.

Each place in a batch has the task family that the mixture's cycle gives it, so the mixture's weights hold, or the one
that a curriculum says. Within the family it takes a new problem, or draws one again that the policy solves about half
of the time: from those it learns most, as a group whose answers are all right or all wrong has no gradient. Where few
new problems are such, as few are drawn again: others teach more than the same ones. What is solved nearly always is
retired, what is never solved is quarantined, and both come back after a while. Until then a row of a table is left out
of its epochs, too.

A step is planned once the step before the oldest that may be under way is consumed, from the results of all up to that.
So the plan depends on results, never on when they came; and its state, a few numbers for each problem, goes into the
trainer's checkpoints: a resumed run draws what an uninterrupted one does.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.shuffle import derived_seed
from rl.controller.curriculum import Curriculum, FamilyRecord
from rl.protocol.messages import Group, Problem
from rl.tasks.mixture import TaskMixture

__all__ = ["ChosenProblem", "PromptPool"]

_FAMILY_DISCOUNT = 0.97  # discount of a family's results at each further group: about the last 33 groups count


class ChosenProblem(NamedTuple):
    """A problem of a step: a new one of a family, or one that was drawn before."""

    draw: int  # earlier drawings; 0: it is new
    family: int  # number of its family in the mixture
    number: int  # the family's turn of a new one, else the problem's id


@dataclasses.dataclass(slots=True)
class Record:
    """Results of a problem. Older draws, of older policies, count less."""

    solved: float = 0.0  # answers, discounted
    answers: float = 0.0  # discounted
    draws: int = 0
    last: int = -1  # step
    rests_until: int = 0  # step; 0: it may be drawn
    unsolved: int = 0  # answers since the last that was right

    @property
    def rate(self) -> float:
        """Mean of the share of right answers, before any were seen one half."""
        return (self.solved + 1) / (self.answers + 2)


class PromptPool(Configurable):
    """State of the pool after a number of steps; `after` returns the next, and changes nothing."""

    class Config(ConfigBase["PromptPool"], renamed={"solved_at": "correct_threshold"}):
        size: int = 512  # problems with kept results, and as many again that rest
        explore: float = 0.5  # lower bound on the share of new problems
        # Problems of a family drawn again for each without a gradient, up to 1 - `explore`; None: as many as fit.
        again_per_dead: float | None = None
        curriculum: Curriculum.Config | None = None  # shares of families by pass rates; None: the mixture's shares
        target: float = 0.5  # share of right answers of problems to draw again; the nearest is taken
        width: float = 0.35  # limit of the distance to the target for problems drawn again
        retire_at: float = 0.9  # share of right answers beyond which a problem rests
        quarantine_after: int = 16  # wrong answers in a row that make a problem rest
        rest: int = 100  # steps that a problem rests
        discount: float = 0.5  # weight of earlier results at each further draw, as the policy has changed
        correct_threshold: float = 1.0  # lower bound on the reward of a right answer
        seed: int = 0
        # Draw problems again with the noise of their first time, and draft from their last rollouts. Unbiased for each
        # update, but errors of updates are correlated (docs/inside/speculation.md).
        same_noise: bool = False
        earlier_tokens: int = 1 << 22  # tokens that are kept for those drafts

        @override
        def check_fields(self) -> None:
            self.require_least(1, "size", "quarantine_after", "rest")
            for field in ("explore", "target", "retire_at", "discount"):
                self.require(field, 0 <= getattr(self, field) <= 1, "0 to 1")
            self.require("width", 0 < self.width <= 1, "more than 0, up to 1")
            self.require_least(0, "again_per_dead", "earlier_tokens")
            again = self.explore < 1 or not self.same_noise
            self.require("same_noise", again, "False with explore=1: no problem is drawn again")

    def __init__(self, cfg: Config, *, tasks: TaskMixture, groups: int, staleness: int):
        """Plan nothing yet; `groups`: problems of a step, at most; `staleness`: further steps under way."""
        self.cfg, self._tasks, self._groups, self._staleness = cfg, tasks, groups, staleness
        self._step = 0  # steps consumed
        self._turns = [0] * len(tasks.family_names)  # new problems planned, by family
        self._records: dict[int, Record] = {}  # problem id -> record
        self._families = [FamilyRecord() for _ in tasks.family_names]
        self._curriculum: Curriculum | None = None
        self._course: dict[str, Any] = {}  # state of the curriculum
        if cfg.curriculum is not None:
            self._curriculum = cfg.curriculum.build(weights=tasks.weights)
            self._course = self._curriculum.begin()
        self._plans: dict[int, list[ChosenProblem]] = {}  # steps not yet consumed -> plan

    def start(self, step: int, state: Mapping[str, Any] | None = None) -> Self:
        """Return the pool with `step` steps consumed: as `state` says, or without results."""
        made = self._copy()
        made._step, made._records, made._plans = step, {}, {}
        if state is not None and state["step"] == step:
            made._turns = list(state["turns"])
            made._records = {int(problem): Record(*values) for problem, values in state["records"].items()}
            made._plans = {int(of): [ChosenProblem(*one) for one in plan] for of, plan in state["plans"].items()}
            made._families = [FamilyRecord(*values) for values in state.get("families", [])] or made._families
            made._course = dict(state.get("course") or made._course)
            return made
        made._turns = [0] * len(made._turns)
        made._families = [FamilyRecord() for _ in made._turns]
        made._course = {} if made._curriculum is None else made._curriculum.begin()
        for index in range(step * self._groups):
            made._turns[self._tasks.place(index).family] += 1
        for ahead in range(self._staleness + 1):
            made._plan(step + ahead)
        return made

    def after(self, groups: Sequence[Group]) -> Self:
        """Return the pool with one more step consumed, of whose problems the first ones have these groups."""
        made = self._copy()
        step = made._step
        for choice, group in zip(made._plans.pop(step), groups, strict=False):
            made._record(step, choice, group)
        made._step = step + 1
        made._forget()
        if made._curriculum is not None:
            made._course = made._curriculum.after(made._course, made._families)
        made._plan(step + 1 + self._staleness)
        return made

    def state(self) -> dict[str, Any]:
        """Return what `start` takes back, as JSON holds it."""
        records = {str(problem): list(dataclasses.astuple(record)) for problem, record in self._records.items()}
        plans = {str(step): [list(choice) for choice in plan] for step, plan in self._plans.items()}
        families = [list(dataclasses.astuple(record)) for record in self._families]
        known = {"records": records, "plans": plans, "families": families}
        return {"step": self._step, "turns": self._turns, **known, "course": self._course}

    def planned(self, step: int) -> bool:
        """Return True if the problems of a step are known."""
        return step in self._plans

    def problem(self, step: int, place: int) -> tuple[Problem, int]:
        """Return a problem of a planned step, and how often it was drawn before."""
        choice = self._plans[step][place]
        if choice.draw:
            return self._tasks.problem(choice.number), choice.draw
        return self._tasks.new(choice.family, choice.number), 0

    def figures(self) -> dict[str, float]:
        """Return figures for the metrics: problems by standing, and the share that the next step draws again."""
        resting = [record for record in self._records.values() if record.rests_until > self._step]
        retired = sum(record.rate > self.cfg.target for record in resting)
        plan = self._plans.get(self._step, [])
        return {
            "pool/open": float(len(self._records) - len(resting)),
            "pool/retired": float(retired),
            "pool/quarantined": float(len(resting) - retired),
            "pool/again_fraction": sum(choice.draw > 0 for choice in plan) / max(1, len(plan)),
            **self._shares_of_families(),
        }

    def _shares_of_families(self) -> dict[str, float]:
        if self._curriculum is None:
            return {}
        shares = self._curriculum.shares(self._course, self._families)
        return {f"pool/share/{name}": share for name, share in zip(self._tasks.family_names, shares, strict=True)}

    def _copy(self) -> Self:
        made = type(self)(self.cfg, tasks=self._tasks, groups=self._groups, staleness=self._staleness)
        made._step, made._turns = self._step, list(self._turns)
        made._records = {problem: dataclasses.replace(record) for problem, record in self._records.items()}
        made._plans = dict(self._plans)
        made._families, made._course = list(self._families), dict(self._course)
        return made

    def _record(self, step: int, choice: ChosenProblem, group: Group) -> None:
        """Add a group's answers to the results of its problem. Answers that could not be scored say nothing."""
        cfg, rewards = self.cfg, group.drawn_rewards()
        problem = self._tasks.canonical(group.prompt.id)
        record = self._records.setdefault(problem, Record())
        record.last, record.draws = step, max(record.draws, choice.draw) + 1
        if not rewards:
            return
        solved = sum(reward >= cfg.correct_threshold for reward in rewards)
        if not choice.draw:  # problems drawn again are no fair sample of the family
            families = self._families
            families[choice.family] = families[choice.family].after(len(rewards), solved, _FAMILY_DISCOUNT)
        record.solved = cfg.discount * record.solved + solved
        record.answers = cfg.discount * record.answers + len(rewards)
        record.unsolved = 0 if solved else record.unsolved + len(rewards)
        retired = record.solved >= cfg.retire_at * record.answers
        rests = retired or record.unsolved >= cfg.quarantine_after
        record.rests_until = step + 1 + cfg.rest if rests else 0

    def _forget(self) -> None:
        """Keep the results of as many problems as have room: the likeliest to be drawn, the latest that rest."""
        resting: list[tuple[float, ...]] = []
        drawable: list[tuple[float, ...]] = []
        for problem, record in self._records.items():
            if record.rests_until > self._step:
                resting.append((-record.rests_until, problem))
            else:
                drawable.append((abs(record.rate - self.cfg.target), -record.last, problem))
        if max(len(resting), len(drawable)) > self.cfg.size:
            kept = {one[-1] for group in (resting, drawable) for one in sorted(group)[: self.cfg.size]}
            self._records = {problem: record for problem, record in self._records.items() if problem in kept}

    def _plan(self, step: int) -> None:
        rng = np.random.default_rng(derived_seed("pool", self.cfg.seed, step))
        taken = {choice.number for plan in self._plans.values() for choice in plan if choice.draw}
        plan: list[ChosenProblem] = []
        resting: dict[int, set[int]] = {}  # family -> resting problems
        for problem, record in self._records.items():
            if record.rests_until > step:
                resting.setdefault(problem % len(self._turns), set()).add(problem)
        again: dict[int, Iterator[int]] = {}  # family -> its problems to draw again, the best first
        for family in self._places(step):
            problem = None
            if rng.random() >= 1 - self._again_share(family):
                if family not in again:
                    again[family] = self._again(family, step, taken, rng)
                problem = next(again[family], None)
            if problem is not None:
                plan.append(ChosenProblem(self._records[problem].draws, family, problem))
            else:
                plan.append(ChosenProblem(0, family, self._new(family, resting)))
        self._plans[step] = plan

    def _new(self, family: int, resting: dict[int, set[int]]) -> int:
        """Take the family's next turn whose problem does not rest; where all rows of a table rest, the next one."""
        rest, first = resting.get(family, set()), self._turns[family]
        turns = range(first, first + 2 * len(rest) + 1)  # a row has one in each epoch
        chosen = next((turn for turn in turns if self._tasks.first_choice(family, turn) not in rest), None)
        if chosen is None:
            resting.pop(family)  # no other turn of this plan has to look for one
            chosen = first
        self._turns[family] = chosen + 1
        return chosen

    def _places(self, step: int) -> list[int]:
        """Return the families of a step's places."""
        if self._curriculum is None:
            return [self._tasks.place(step * self._groups + place).family for place in range(self._groups)]
        shares = self._curriculum.shares(self._course, self._families)
        families, self._course = self._curriculum.order(self._course, shares, self._groups)
        return families

    def _again_share(self, family: int) -> float:
        """Return the share of a family's places for problems that were drawn before."""
        most, each = 1 - self.cfg.explore, self.cfg.again_per_dead
        return most if each is None else min(most, each * self._families[family].dead_share)

    def _again(self, family: int, step: int, taken: set[int], rng: np.random.Generator) -> Iterator[int]:
        """Yield a family's problems by rates drawn from posteriors (Thompson), the nearest to the target first."""
        count, records = len(self._turns), self._records
        problems = [
            problem
            for problem in sorted(records)
            if problem % count == family and problem not in taken and records[problem].rests_until <= step
        ]
        solved, answers = (
            np.array([getattr(records[problem], name) for problem in problems]) for name in ("solved", "answers")
        )
        distances = np.abs(rng.beta(solved + 1, answers - solved + 1) - self.cfg.target)
        order: list[int] = np.argsort(distances, kind="stable").tolist()
        return (problems[index] for index in order if distances[index] < self.cfg.width)
