"""Elastic training by real processes that are killed by SIGKILL, against the same run in one process, undisturbed."""

from functools import partial
from pathlib import Path

import pytest

from tests.axlearn_like.elastic.killed import STEPS, Faults, check_ended, check_same_bits, supervised, undisturbed_run
from tests.axlearn_like.elastic.process import config

run_members = partial(supervised, "tests.axlearn_like.elastic.process", config(STEPS))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(config, tmp_path_factory)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"1": ("gradients", 25)}, id="in the gradients of a step"),
        pytest.param({"0": ("sums", 21)}, id="the first process, in the exchange"),
        pytest.param({"2": ("exchange", 22)}, id="when it has sent to one of two"),
        pytest.param({"1": ("update", 9)}, id="before its update, when others make theirs"),
        pytest.param({"0": ("gradients", 25), "2": ("resize", 1)}, id="the first, and another in the resize"),
        pytest.param({"0": ("exchange", 21), "1": ("exchange", 22)}, id="two at once"),
        pytest.param({"1": ("gradients", 25), "0": ("offer", 1)}, id="the one that gives its state away"),
    ],
)
def test_killed_processes_change_no_bit_and_come_back(
    tmp_path: Path, undisturbed: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
):
    events = run_members(tmp_path / "run", 3, faults, monkeypatch)
    check_same_bits(tmp_path / "run", undisturbed)
    resized = check_ended(events, faults)
    assert resized[-1]["bytes"] > 0
    # Each process restores its first state from no checkpoint: a run that did would begin again, at step 4 or later.
    assert [row["step"] for row in events if row["event"] == "train_begin"][0] == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_when_all_are_lost_at_once_the_checkpoint_counts_and_the_lost_steps_are_told(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
):
    faults: Faults = {"0": ("update", 11), "1": ("update", 11)}  # the first call compiles
    events = run_members(tmp_path / "run", 2, faults, monkeypatch)
    check_same_bits(tmp_path / "run", undisturbed)
    lost = [row for row in events if row["event"] == "resized" and row["members_before"]]
    assert lost[0]["steps_lost"] == 1 and lost[0]["step"] == 9, "checkpoints are of steps 4 and 8, and 9 was made"
