"""A kept result is found again only by what would score alike: nested verifiers, functions and rows included."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, override

import pytest

from axlearn_like.config import trust
from axlearn_like.config.trusted_code import VARIABLE
from rl.protocol.messages import Problem
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.datasets import rows
from rl.verification.scorers import FunctionScorer, Scorer
from rl.verification.verifiers.by_task import ByTask
from rl.verification.verifiers.cache import Cached
from rl.verification.verifiers.reward import Function, Reward
from rl.verification.verifiers.rows import RowScorer
from rl.verification.verifiers.self_test import Rows
from rl.verification.verifiers.terms import Format, Verified

ROWS = Rows.Config(rows=({"question": "Who?", "answer": "Ada"},))


class Counting(RowScorer):
    """A verifier that counts its calls and scores them by their number."""

    VERSION = 1
    calls = 0

    class Config(RowScorer.Config):
        pass

    @override
    def judge(self, answer: str, reference: Any, problem: Problem) -> float:
        Counting.calls += 1
        return float(Counting.calls)


def score(cfg: Scorer.Config, folder: Path) -> Any:
    """Return the score of an answer to the first problem, by a cache that is opened for it as a new process does."""
    found = Cached.Config(scorer=cfg, path=str(folder / "results.sqlite")).build().score(0, "Ada")
    return found["reward"] if isinstance(found, dict) else found


@pytest.fixture
def mixture(tmp_path: Path) -> TaskMixture.Config:
    """Tasks of two rows in a file."""
    (tmp_path / "rows.jsonl").write_text('{"q": "Who?", "a": "Ada"}\n{"q": "Where?", "a": "London"}\n')
    return TaskMixture.Config(families=(rows(str(tmp_path / "rows.jsonl"), prompt="q", answer="a").set(label="mine"),))


def in_reward(mixture: TaskMixture.Config) -> Scorer.Config:
    """A verifier as a term of a reward."""
    return Reward.Config(mixture=ROWS, terms=(Verified.Config(verifier=Counting.Config(mixture=ROWS)),))


def by_task(mixture: TaskMixture.Config) -> Scorer.Config:
    """A verifier of one task of several."""
    other = FunctionScorer.Config(function=len_of)
    return ByTask.Config(mixture=mixture, scorers={"mine": Counting.Config(mixture=ROWS)}, other=other)


def len_of(problem_id: int, answer: str) -> float:
    """Return the length of an answer."""
    return float(len(answer))


@pytest.mark.parametrize("make", [in_reward, by_task])
def test_a_nested_verifiers_version_counts(
    make: Callable[[TaskMixture.Config], Scorer.Config],
    mixture: TaskMixture.Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Counting, "calls", 0)
    assert [score(make(mixture), tmp_path) for _ in range(2)] == [1.0, 1.0]
    monkeypatch.setattr(Counting, "VERSION", 2)
    assert [score(make(mixture), tmp_path) for _ in range(2)] == [2.0, 2.0]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A user's file `my_cached.py`, written and imported as by a new process."""
    monkeypatch.setenv(
        VARIABLE, os.environ.get(VARIABLE, "")
    )  # to which `trust` adds; processes of other tests read it

    def write(text: str) -> ModuleType:
        sys.modules.pop("my_cached", None)
        (tmp_path / "my_cached.py").write_text(text)
        return importlib.import_module(trust(tmp_path / "my_cached.py"))

    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # files written within a second are told apart
    yield write
    sys.dont_write_bytecode = before
    sys.modules.pop("my_cached", None)


_FUNCTION = "def helper(text):\n    return {value}\n\n\ndef grade(answer):\n    return helper(answer)\n"
_CLASS = """
from rl.verification.verifiers.rows import RowScorer

class Mine(RowScorer):
    class Config(RowScorer.Config):
        pass

    def judge(self, answer, reference, problem):
        return {value}
"""


def test_an_edited_function_counts_with_the_rest_of_its_file(mine: Callable[[str], ModuleType], tmp_path: Path):
    def reward_of(value: float) -> Reward.Config:
        module = mine(_FUNCTION.format(value=value))
        return Reward.Config(mixture=ROWS, terms=(Function.Config(function=module.grade), Format.Config(pattern="x")))

    assert [score(reward_of(value), tmp_path) for value in (0.25, 0.5, 0.25)] == [0.25, 0.5, 0.25]
    kept: Any = Cached.Config(scorer=reward_of(0.5), path=str(tmp_path / "results.sqlite")).build()
    assert kept.score(0, "Ada")["grade"] == 0.5 and (kept.results.hits, kept.results.misses) == (1, 0)


def test_an_edited_class_counts_without_a_version_of_its_own(mine: Callable[[str], ModuleType], tmp_path: Path):
    assert score(mine(_CLASS.format(value=0.25)).Mine.Config(mixture=ROWS), tmp_path) == 0.25
    assert score(mine(_CLASS.format(value=0.5)).Mine.Config(mixture=ROWS), tmp_path) == 0.5


def test_changed_rows_count(mixture: TaskMixture.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Counting, "calls", 0)
    cfg = Counting.Config(mixture=mixture)
    assert [score(cfg, tmp_path) for _ in range(2)] == [1.0, 1.0]
    (tmp_path / "rows.jsonl").write_text('{"q": "Who?", "a": "Grace"}\n{"q": "Where?", "a": "London"}\n')
    assert score(cfg, tmp_path) == 2.0
