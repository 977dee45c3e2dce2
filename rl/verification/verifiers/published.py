"""Verifiers of published datasets, by the labels that rl/tasks/rows/datasets.py gives them."""

from collections.abc import Callable

from rl.tasks.mixture import TaskMixture
from rl.verification.scorers import Scorer
from rl.verification.verifiers.code import CodeVerifier
from rl.verification.verifiers.sql import SqlVerifier

__all__ = ["VERIFIERS", "ehrsql", "humaneval"]


def humaneval(mixture: TaskMixture.Config) -> CodeVerifier.Config:
    """Tests of the row, on the prompt's function as the answer completes or repeats it."""
    return CodeVerifier.Config(mixture=mixture, prompt_field="prompt")


def ehrsql(mixture: TaskMixture.Config) -> SqlVerifier.Config:
    """Results of the query on databases made for the row's schema; RS(0) is its pass@1."""
    return SqlVerifier.Config(mixture=mixture, seconds=5.0)


VERIFIERS: dict[str, Callable[[TaskMixture.Config], Scorer.Config]] = {"humaneval": humaneval, "ehrsql": ehrsql}
