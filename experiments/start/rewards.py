"""The reward of a start: the user's function, tried on the first rows, or the comparison with the rows' answers."""

import traceback
from collections.abc import Mapping
from typing import Any

from axlearn_like.config.trusted_code import file_of
from experiments.start.plan import Plan
from experiments.start.problems import MARK, Problems
from mesh.errors import UserError
from rl.verification.scorers import ReasoningGymScorer, Scorer
from rl.verification.verifiers.math import MathVerifier
from rl.verification.verifiers.reward import reward

_COMPARISONS = {
    "number": "the answer's final number is that of the row",
    "mark": f"the answer's final number is that behind {MARK} in the row",
    "math": "the answer has the value of the row's, in LaTeX or plain (MathVerifier)",
    "text": "the answer is the row's, as text or as a number",
}


def choose_scorer(place: str | None, problems: Problems, plan: Plan) -> Scorer.Config:
    """Note and return the scorer: that of `--reward`, after a trial, or the one that fits the rows' answers.

    Raises:
        UserError: the reward fails on one of the first rows; or there is none, and the rows have no answers.
    """
    if place is not None:
        scorer = reward(place, problems.tasks)
        values = [_tried(place, scorer, problems, number) for number in range(len(problems.first))]
        shown = ", ".join(f"{value:g}" for value in values)
        said = "the rows' own answers" if problems.compared else "an empty answer"
        plan.say("reward", place, f"tried on {len(values)} rows: {said} got {shown}")
        return scorer
    if problems.compared is None:
        raise UserError(
            f"--data {problems.files}: its rows have no answer to compare with; expected a column `answer`, or a "
            "reward of your own: --reward FILE.py:FUNCTION"
        )
    plan.say("reward", "1 or 0", f"1 if {_COMPARISONS[problems.compared]}")
    kind = MathVerifier if problems.compared == "math" else ReasoningGymScorer
    return kind.Config(mixture=problems.tasks)


def _tried(place: str, scorer: Scorer.Config, problems: Problems, number: int) -> float:
    """Return the reward of a row's own answer, or of an empty one."""
    problem, where = problems.first[number]
    tokens = problems.model.built.encode(problem.answer)
    try:
        scorer.check()
        for term in getattr(scorer, "terms", ()):
            term.check_problem(problem)
        built: Any = scorer.build()
        value = built.score_samples(problem.id, [problem.answer], [{"tokens": tokens, "finish_reason": "stop"}])[0]
        if isinstance(value, Exception):
            raise value
    except UserError as error:
        raise UserError(f"--reward {place}: {error}") from error
    except Exception as error:  # user code may raise anything
        own = file_of(scorer.terms[0].function.__module__)  # pyright: ignore[reportAttributeAccessIssue]
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == str(own)]
        line = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        raise UserError(
            f"--reward {place} fails on {where}: {type(error).__name__}: {error}{line}; it was given the answer "
            f"{problem.answer!r:.80}"
        ) from error
    return float(value["reward"] if isinstance(value, Mapping) else value)
