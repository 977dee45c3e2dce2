"""Every experiment on every target: what a dry run writes is what is stored, or it is refused by the same words."""

import difflib

import pytest

from experiments.registry import entries
from tests.golden.launch.every import FOLDER, PLANS, TARGETS, load, planned, rendered

STORED = load()
AGAIN = "`python -m tests.golden.launch.every"


def test_every_experiment_is_there():
    assert sorted(STORED) == sorted(entries()), f"{AGAIN}`"
    refused = [name for name, one in STORED.items() if "refused" in one]
    assert refused == ["demo_distillation"], "which needs its teacher's checkpoint"
    assert sorted(FOLDER.iterdir()) == sorted([PLANS, *(FOLDER / f"{target}.txt" for target in TARGETS)])


def test_files_of_every_experiment_are_the_stored_ones_on_every_target():
    for target, now in rendered(STORED).items():
        stored = (FOLDER / f"{target}.txt").read_text()
        difference = list(difflib.unified_diff(stored.splitlines(), now.splitlines(), lineterm="", n=0))
        assert not difference, f"{AGAIN} --render`, if this is meant:\n" + "\n".join(difference)


@pytest.mark.full
@pytest.mark.parametrize("name", STORED)
def test_plans_are_the_stored_ones(name: str):
    assert planned(name) == STORED[name], f"{AGAIN} {name}`, if this is meant"
