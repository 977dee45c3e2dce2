"""The configs of experiments are those stored: a changed default is a line in every experiment that uses it."""

import difflib

import pytest

from axlearn_like.config import from_text, to_text
from experiments.registry import entries
from tests.golden.configs import DIRECTORY, golden_texts


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return golden_texts()


@pytest.mark.parametrize("name", entries())
def test_an_experiment_composes_what_is_stored(name, texts):
    path = DIRECTORY / f"{name}.txt"
    assert path.exists(), f"no {path.name}; `python -m tests.golden.configs` writes it"
    difference = list(difflib.unified_diff(path.read_text().splitlines(), texts[name].splitlines(), lineterm="", n=0))
    assert not difference, "`python -m tests.golden.configs`, if this is meant:\n" + "\n".join(difference)


@pytest.mark.parametrize("name", entries())
def test_the_text_is_the_experiment(name, texts):
    assert to_text(from_text(texts[name])) == texts[name]


def test_nothing_is_stored_of_experiments_that_are_gone():
    assert {path.stem for path in DIRECTORY.glob("*.txt")} == set(entries())
