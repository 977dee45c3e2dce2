"""Rewards of the user's own: plain functions, weighted, gated, and named in metrics and report.

A function says by its parameters' names what it wants: `answer` or, for the whole group at once, `answers`; `row` (the
problem's record), `question`, `reference`, `family`, `problem_id`; `tokens` and `finish_reason`, lists for a group; and
any field of the row. It returns a number or a dict of named numbers, of a group a list of them; it may be `async`.

    def score(answer, reference):
        return float(answer.strip() == reference)
"""

import asyncio
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.config.declared import installed, place_of
from axlearn_like.config.trusted_code import import_place
from mesh.errors import UserError, did_you_mean
from rl.protocol.messages import Details, Problem
from rl.verification.rewards import NotAReward, as_list, check_terms, describe, number
from rl.verification.scorers import TaskScorer
from rl.verification.verifiers.terms import Term

_OF_ROLLOUT = ("tokens", "finish_reason")
_OF_PROBLEM = {"row": "entry", "question": "question", "reference": "answer", "family": "family", "problem_id": "id"}


class Function(Term):
    """A function of the user's own."""

    class Config(Term.Config):
        function: Callable[..., Any] = REQUIRED
        inherits: tuple[str, ...] = ()  # environment variables that it needs, such as a key

        @override
        def title(self) -> str:
            return self.name or self.function.__name__

        @override
        def wants(self) -> frozenset[str]:
            names = set(_parameters(self.function))
            group = {"group"} if "answers" in names or inspect.iscoroutinefunction(self.function) else set()
            return frozenset(names & {*_OF_ROLLOUT}) | group

        @override
        def environment(self) -> tuple[str, ...]:
            return self.inherits

        @override
        def check_fields(self) -> None:
            names = _parameters(self.function)
            one = ("answer" in names) != ("answers" in names)
            what = "a function with a parameter `answer`, or `answers` for a whole group"
            self.require("function", one, what)

        @override
        def check_problem(self, problem: Problem) -> None:
            known = [*_given(problem), *_OF_ROLLOUT]
            lacking = [name for name in _parameters(self.function) if _shared(name) and name not in known]
            hint = did_you_mean(lacking[0], known, limit=len(known)) if lacking else ""
            has = f"parameters that a problem of family {problem.family!r} has: no {', '.join(lacking)}{hint}"
            self.require("function", not lacking, has)

    def __init__(self, cfg: Config):
        self._function, self._names = cfg.function, _parameters(cfg.function)
        self._asynchronous = inspect.iscoroutinefunction(cfg.function)

    @override
    def values(self, problem: Problem, answers: Sequence[str], details: Sequence[Details]) -> Sequence[Any]:
        given, wanted = _given(problem), list(filter(_shared, self._names))
        if lacking := [name for name in wanted if name not in given]:
            has = ", ".join((*given, *_OF_ROLLOUT))
            raise LookupError(
                f"the reward wants {lacking[0]!r}, which the row of problem {problem.id} has not; it has {has}"
            )
        # A copy for each call: a function may change its row.
        own = functools.partial(copy.deepcopy, {name: given[name] for name in wanted})
        told = [name for name in _OF_ROLLOUT if name in self._names]
        if "answers" in self._names:
            lists = {name: [one[name] for one in details] for name in told}
            calls = [functools.partial(self._function, answers=list(answers), **lists, **own())]
        else:
            calls = [
                functools.partial(
                    self._function, answer=answer, **own(), **{name: details[index][name] for name in told}
                )
                for index, answer in enumerate(answers)
            ]
        results = asyncio.run(_together(calls)) if self._asynchronous else list(map(_attempt, calls))
        if "answers" not in self._names:
            return results
        rewards = as_list(results[0])
        if isinstance(rewards, Exception):
            raise rewards
        if isinstance(rewards, str) or not isinstance(rewards, Sequence):
            raise NotAReward(f"{self._function.__name__} returned {describe(results[0])}; expected a list of rewards")
        if len(rewards) != len(answers):
            raise NotAReward(f"{self._function.__name__} returned {len(rewards)} rewards for {len(answers)} answers")
        return rewards


class Reward(TaskScorer):
    """The product of the gates and the weighted sum of the other terms; each is a term of the score, unweighted.

    Of a function that returns named numbers, "reward" is the term's value if it is among them, else their sum.
    """

    class Config(TaskScorer.Config):
        terms: tuple[Term.Config, ...] = REQUIRED

        @override
        def check_fields(self) -> None:
            titles = [term.title() for term in self.terms]
            self.require("terms", bool(titles) and len(set(titles)) == len(titles), "terms of different names")
            self.require("terms", not all(term.gate for term in self.terms), "a term that is no gate")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._terms: Sequence[tuple[str, Term.Config, Any]] = [(one.title(), one, one.build()) for one in cfg.terms]

    @override
    def score(self, problem_id: int, answer: str) -> Any:
        return self.score_samples(problem_id, [answer], [{}])[0]

    @override
    def score_samples(self, problem_id: int, answers: Sequence[str], details: Sequence[Details]) -> Sequence[Any]:
        problem = self.problem(problem_id)
        found: list[dict[str, float]] = [{} for _ in answers]
        sums, gates = [0.0] * len(answers), [1.0] * len(answers)
        failed: dict[int, Exception] = {}
        for title, cfg, term in self._terms:
            for index, value in enumerate(term.values(problem, answers, details)):
                if isinstance(value := _value(value, title), Exception):
                    failed[index] = value
                    continue
                total, named = value
                found[index] |= named
                if cfg.gate:
                    gates[index] *= total
                else:
                    sums[index] += cfg.weight * total
        scores = [{**terms, "reward": gate * sum_} for terms, gate, sum_ in zip(found, gates, sums, strict=True)]
        return [failed.get(index, score) for index, score in enumerate(scores)]


def reward(function: Callable[..., Any] | str, mixture: ConfigBase[Any], *more: Term.Config) -> Reward.Config:
    """Return the config of a reward by a function, its place `my_file.py:score` or its name in `axl.verifiers`.

    `more` terms are added to it.

    Raises:
        UserError: there is no such file or function.
    """
    if isinstance(function, str):
        if ":" not in function and function in installed("verifiers"):
            function = place_of("verifiers", function)
        place, _, name = function.rpartition(":")
        module = import_place(place) if place else None
        found = getattr(module, name, None)
        if not callable(found):
            names = [key for key, value in vars(module).items() if callable(value)] if module else []
            has = (
                f"{Path(place).name} has {', '.join(names) or 'none'}"
                if module
                else "expected FILE.py:FUNCTION, or a name"
            )
            raise UserError(f"{function!r} is no function: {has}")
        function = found
    return Reward.Config(mixture=mixture, terms=(Function.Config(function=function), *more))


def _value(value: Any, title: str) -> tuple[float, dict[str, float]] | Exception:
    """Return the value of a term and the numbers to be shown, its own and those that it names; or why there is none."""
    if isinstance(value, Exception):
        return value
    try:
        if not isinstance(value, Mapping):
            total = number(value, title)
            return total, {title: total}
        terms = check_terms(value)
    except NotAReward as error:
        return error
    total = terms.pop("reward", None)
    total = sum(terms.values()) if total is None else total
    return total, {title: total, **terms}


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names that a function wants: those without a default, and those with one that are known here."""
    known = {"answer", "answers", *_OF_ROLLOUT, *_OF_PROBLEM}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [one for one in inspect.signature(function).parameters.values() if one.kind in kinds]
    return [one.name for one in parameters if one.default is one.empty or one.name in known]


def _shared(name: str) -> bool:
    return name not in ("answer", "answers", *_OF_ROLLOUT)


def _given(problem: Problem) -> dict[str, Any]:
    """Return what a problem has for functions: its own fields, and those of its row that have other names."""
    own = {name: getattr(problem, field) for name, field in _OF_PROBLEM.items()}
    return own | {str(name): value for name, value in problem.entry.items() if name not in own}


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # user code may raise for one answer
        return error


async def _together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what each call returned, or the exception that it raised: that of one answer is not that of others."""
    return list(await asyncio.gather(*(call() for call in calls), return_exceptions=True))
