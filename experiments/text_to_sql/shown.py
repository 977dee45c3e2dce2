"""Demonstrations of `SqlAttempts`: queries with wrong names, which are not learned, and what to do about the errors."""

import re
from collections.abc import Sequence

import numpy as np

from axlearn_like.config import config_function
from axlearn_like.input.shuffle import derived_seed
from experiments.text_to_sql.attempts import KEPT
from experiments.text_to_sql.questions import is_named
from experiments.text_to_sql.schemas import NUMBERS, TABLES, TEXTS
from rl.environments.demonstrations import Mistake
from rl.protocol.messages import Problem

__all__ = ["TRIES", "attempts"]

TRIES = 3
_OTHER = {
    name: next((one for one in names if one != name), name)
    for names in (*TABLES.values(), *NUMBERS.values(), *TEXTS.values())
    for name in names
}


@config_function
def attempts(problem: Problem) -> Sequence[str]:
    """Return the actions of a demonstration of `TRIES` tries: in half of them some names are wrong at first."""
    rng = np.random.default_rng(derived_seed("text to sql attempts", problem.question))
    steps, _, answer = problem.answer.rpartition("\n")
    queries = _corrections(problem.entry["tempting"], rng, lacking=answer != problem.entry["tempting"])
    before = f"{steps}\n" if steps else ""
    mistakes = [Mistake(before + query) for query in queries]
    kept = [KEPT] * (len(mistakes) < TRIES - 1 and answer == problem.entry["tempting"])
    return [*mistakes, before + answer, *kept]


def _corrections(query: str, rng: np.random.Generator, *, lacking: bool) -> list[str]:
    """Return queries of which each is wrong in fewer names, in the order in which SQLite names them."""
    if rng.random() < 0.5:
        return []
    table, columns = query.split(" FROM ")[1].split()[0], [name for name in _OTHER if is_named(query, name)]
    columns = sorted((name for name in columns if name != table), key=query.index)
    named = [table, *([] if lacking else columns)]
    wrong = [name for name in named if rng.random() < 0.5][-TRIES + 1 + lacking :]
    found = [_renamed(query, wrong[first:]) for first in range(len(wrong))]
    return [*found, query] if lacking else found


def _renamed(query: str, wrong: Sequence[str]) -> str:
    for name in wrong:
        query = re.sub(rf"\b{name}\b", _OTHER[name], query)
    return query
