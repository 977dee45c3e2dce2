"""Games of one policy with frozen ones: against its former self, which only one of them wins, and with its base.

axl train experiments/tasks/roles.py:base --run-dir runs/roles_base
axl rl experiments/tasks/consulting.py:nim_against_itself
axl rl experiments/tasks/consulting.py:delegate
"""

from collections.abc import Mapping
from typing import Any, override

from experiments.tasks.calculator import products
from experiments.tasks.roles import nim_tasks, policies_on_base
from rl.environments.calls import TextCalls
from rl.environments.environment import Consult, Environment, Row
from rl.environments.tools.calculator import calculate
from rl.experiment import RLExperiment

QUESTION = "Solve the following multiplication: {expression}. Give only the result as your final answer."


class NimAgainst(Environment):
    """A pile of which the policy and a frozen one take 1 to 3 in turn; who takes the last one wins a point.

    Who makes no such move loses. What one wins the other loses.
    """

    class Config(Environment.Config):
        max_turns: int = 16
        max_turn_tokens: int | None = 1
        pure: bool = True
        consults: tuple[str, ...] = ("player@-8",)

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._opponent, self._pile = cfg.consults[0], 0
        self._best, self._chances = 0, 0  # moves from piles that can be won, and those that keep the win

    @override
    def reset(self, row: Row) -> str:
        self._pile = int(row["pile"])
        return ""

    @override
    def step(self, action: str) -> Any:
        self._chances += self._pile % 4 > 0
        self._best += action.strip() == str(self._pile % 4)
        if not self._take(action):
            return "", -1.0, True
        return Consult(self._opponent, f"{self._pile} left:", 1) if self._pile else ("", 1.0, True)

    @override
    def hear(self, answer: str) -> Any:
        if not self._take(answer):
            return "", 1.0, True
        return (f" {self._pile} left:", 0.0, False) if self._pile else ("", -1.0, True)

    @override
    def figures(self) -> Mapping[str, float]:
        return {"best_moves": self._best / self._chances} if self._chances else {}

    def _take(self, move: str) -> bool:
        taken = move.strip()
        if taken not in ("1", "2", "3") or int(taken) > self._pile:
            return False
        self._pile -= int(taken)
        return True


class Delegate(Environment):
    """The policy answers a product, or hands it on to its base, which has a calculator: both win if it is right."""

    class Config(Environment.Config):
        max_turns: int = 1
        pure: bool = True
        consults: tuple[str, ...] = ("base",)

        @override
        def stop_strings(self) -> tuple[str, ...]:
            return TextCalls.Config().stop_strings()

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._form, self._answer, self._handed_on = TextCalls.Config().build(), "", 0

    @override
    def reset(self, row: Row) -> str:
        self._answer = row["answer"]
        return ""

    @override
    def step(self, action: str) -> Any:
        if (expression := self._called(action)) is None:
            return self._done(action)
        self._handed_on = 1
        return Consult("base", QUESTION.format(expression=expression), 20, TextCalls.Config().stop_strings())

    @override
    def hear(self, answer: str) -> Any:
        if (expression := self._called(answer)) is None:
            return self._done(answer)
        try:
            return self._done(calculate(expression))
        except (ValueError, ArithmeticError):
            return self._done("")

    @override
    def figures(self) -> Mapping[str, float]:
        return {"handed_on": self._handed_on}

    def _called(self, text: str) -> str | None:
        try:
            (call,) = self._form.calls(text)
        except ValueError:
            return None
        return None if call.error else call.text

    def _done(self, answer: str) -> tuple[str, float, bool]:
        return "", float(answer.strip() == self._answer), True


def nim_against_itself(*, seed: int = 0, steps: int = 60) -> RLExperiment.Config:
    """A LoRA policy learns to win against what it was eight updates before."""
    cfg = policies_on_base(("player",), nim_tasks(NimAgainst.Config(), seed), seed, steps)
    cfg.parameter_server.keep = 13  # versions that episodes ask for
    return cfg.set(evaluation=None)


def delegate(*, seed: int = 0, steps: int = 40) -> RLExperiment.Config:
    """A LoRA policy learns to hand on what its base can find out."""
    (task,) = products(seed).families
    tasks = products(seed).set(families=(task.set(environment=Delegate.Config()),))
    return policies_on_base(("player",), tasks, seed, steps)
