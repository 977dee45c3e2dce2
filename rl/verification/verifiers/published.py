"""Verifiers of published datasets, by the labels that rl/tasks/rows/datasets.py gives them."""

from collections.abc import Callable

from rl.tasks.mixture import TaskMixture
from rl.verification.scorers import Scorer
from rl.verification.verifiers.code import CodeVerifier

__all__ = ["VERIFIERS", "humaneval"]


def humaneval(mixture: TaskMixture.Config) -> CodeVerifier.Config:
    """Tests of the row, on the prompt's function as the answer completes or repeats it."""
    return CodeVerifier.Config(mixture=mixture, prompt_field="prompt")


VERIFIERS: dict[str, Callable[[TaskMixture.Config], Scorer.Config]] = {"humaneval": humaneval}
