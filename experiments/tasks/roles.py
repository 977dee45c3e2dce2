"""Two small games of two policies: one that both win or lose together, and one that only one of them can win.

axl train experiments/tasks/roles.py:base --run-dir runs/roles_base
axl rl experiments/tasks/roles.py:planner_and_solver
axl rl experiments/tasks/roles.py:nim
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, override

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom, WrapPlain
from axlearn_like.config import config_function
from axlearn_like.training.trainer import Trainer
from experiments.modifiers import low_rank
from experiments.tasks.calculator import calculator_rl, calculator_sft, products
from experiments.tasks.small import small_learner
from rl.environments.calls import TextCalls
from rl.environments.environment import Environment, Row
from rl.environments.roles import NextRole, RoleEnvironment
from rl.environments.scoring import NoScorer
from rl.environments.task import EnvironmentTask
from rl.environments.tools.calculator import calculate
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.parameter_server.server import ParameterServer
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows
from rl.verification.inline import InlineVerifier

_PILES = range(4, 30)


class PlanAndSolve(RoleEnvironment):
    """A planner calls the calculator, a solver sees the result and answers: both are paid if the answer is right."""

    class Config(RoleEnvironment.Config):
        players: dict[str, str] = {"planner": "planner", "solver": "solver"}
        max_turns: int = 2
        pure: bool = True

        @override
        def stop_strings(self) -> tuple[str, ...]:
            return TextCalls.Config().stop_strings()

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._form, self._answer, self._planned = TextCalls.Config().build(), "", False

    @override
    def reset(self, row: Row) -> NextRole:
        self._answer = row["answer"]
        return NextRole("planner")

    @override
    def step(self, action: str) -> NextRole:
        if self._planned:
            right = float(action.strip() == self._answer)
            return NextRole(rewards={"planner": right, "solver": right}, done=True)
        self._planned = True
        return NextRole("solver", self._form.results([self._result(action)]))

    def _result(self, action: str) -> str:
        try:
            (call,) = self._form.calls(action)
            return calculate(call.text)
        except (ValueError, ArithmeticError):
            return "?"


class Nim(RoleEnvironment):
    """A pile of which two take 1 to 3 in turn. Who takes the last one wins; who makes no such move loses."""

    class Config(RoleEnvironment.Config):
        players: dict[str, str] = {"left": "left", "right": "right"}
        max_turns: int = 32
        max_turn_tokens: int | None = 1
        pure: bool = True

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._pile, self._order, self._moves, self._legal, self._best = 0, ["left", "right"], 0, 0, 0
        self._chances = 0  # moves from piles that can be won

    @override
    def reset(self, row: Row) -> NextRole:
        self._pile = int(row["pile"])
        if row["seed"] % 2:
            self._order.reverse()
        return NextRole(self._order[0])

    @override
    def step(self, action: str) -> NextRole:
        (mover, other), taken = self._order, action.strip()
        legal = taken in ("1", "2", "3") and int(taken) <= self._pile
        self._moves, self._legal = self._moves + 1, self._legal + legal
        if not legal:
            return NextRole(rewards={mover: -1.0, other: 1.0}, done=True)
        self._chances, self._best = self._chances + (self._pile % 4 > 0), self._best + (int(taken) == self._pile % 4)
        self._pile -= int(taken)
        if not self._pile:
            return NextRole(rewards={mover: 1.0, other: -1.0}, done=True)
        self._order.reverse()
        return NextRole(other, f" {self._pile} left:")

    @override
    def figures(self) -> Mapping[str, float]:
        best = {"best_moves": self._best / self._chances} if self._chances else {}
        return {"legal_moves": self._legal / max(1, self._moves), "moves": self._moves, **best}


@config_function
def piles() -> Iterator[dict[str, Any]]:
    """Yield a row for each pile."""
    yield from ({"prompt": f"{pile} left:", "answer": str(pile % 4), "pile": pile} for pile in _PILES)


def base(*, seed: int = 0, steps: int = 300) -> Trainer.Config:
    """Supervised fine-tuning of the base on transcripts of `calculator_rl`."""
    return calculator_sft(seed=seed, steps=steps)


def planner_and_solver(*, seed: int = 0, steps: int = 40) -> RLExperiment.Config:
    """Two LoRA policies learn to compute products together."""
    (task,) = products(seed).families
    tasks = products(seed).set(families=(task.set(environment=PlanAndSolve.Config()),))
    return policies_on_base(("planner", "solver"), tasks, seed, steps)


def nim(*, seed: int = 0, steps: int = 60) -> RLExperiment.Config:
    """Two LoRA policies learn to win against each other."""
    tasks = nim_tasks(Nim.Config(), seed)
    return policies_on_base(("left", "right"), tasks, seed, steps).set(evaluation=None)


def nim_tasks(game: Environment.Config, seed: int) -> TaskMixture.Config:
    """Return the piles as a task, with a game of them."""
    source = TaskRows.Config(rows=RowFunction.Config(function=piles), label="nim")
    family = EnvironmentTask.Config(source=source, environment=game)
    return TaskMixture.Config(families=(family,), seed=seed, heldout_every=4)


def policies_on_base(names: Sequence[str], tasks: TaskMixture.Config, seed: int, steps: int) -> RLExperiment.Config:
    """Return RL of LoRA policies of these names on what `base` has trained; environments pay all rewards."""
    cfg = calculator_rl(seed=seed, steps=steps)
    low_rank(cfg)
    cfg.trainer.set(checkpoint=Checkpointer.Config(save_every=10, keep=4))
    return cfg.set(
        policies={name: {} for name in names},
        tasks=tasks,
        verifier=InlineVerifier.Config(scorer=NoScorer.Config()),
        start_from=StartFrom.Config(path="runs/roles_base", conversions=(WrapPlain.Config(),)),
        warm_start=None,
        learner=cfg.learner.set(schedule=small_learner(3e-3, 1e-3, warmup=5, steps=steps).schedule),
        parameter_server=ParameterServer.Config(keep=8),
        prompts_per_step=8,
        evaluation=Evaluation.Config(problems_per_family=96),
    )
