"""Elastic training by real processes that are killed by SIGKILL, against the same run in one process, undisturbed."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import to_text
from axlearn_like.elastic.membership import MemberTimeouts
from axlearn_like.elastic.supervisor import MemberSupervisor
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from tests.axlearn_like.elastic.process import config

STEPS = 26
Faults = dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    config(STEPS).build().run(folder, progress=False)
    return folder


def supervised(folder: Path, members: int, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run the members to the end, and return the events."""
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    monkeypatch.setenv("RUN", str(folder))
    command = [sys.executable, "-m", "tests.axlearn_like.elastic.process", str(folder), str(STEPS)]
    with RunDirectory.open(folder, to_text(config(STEPS))) as run:
        MemberSupervisor(command, members, EventLog(run.events_path), MemberTimeouts(60.0, 240.0)).run()
    return read_rows(folder / "events.jsonl")


def check_same_bits(folder: Path, other: Path) -> None:
    ours, theirs = ([without_clock(row) for row in read_rows(run / "metrics.jsonl")] for run in (folder, other))
    assert [row["step"] for row in theirs] == list(range(1, STEPS + 1))
    assert ours == theirs
    found, expected = (restore_params(run / "checkpoints" / str(STEPS)) for run in (folder, other))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


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
    events = supervised(tmp_path / "run", 3, faults, monkeypatch)
    check_same_bits(tmp_path / "run", undisturbed)
    ended = [row for row in events if row["event"] == "member_ended"]
    assert sorted(str(row["member"]) for row in ended) == sorted(faults) and {row["status"] for row in ended} == {-9}
    resized = [row for row in events if row["event"] == "resized"]
    assert resized[0]["members"] == resized[-1]["members"] == 3
    assert min(row["members"] for row in resized) < 3
    assert all(row["steps_lost"] == 0 for row in resized) and resized[-1]["bytes"] > 0
    # Each process restores its first state from no checkpoint: a run that did would begin again, at step 4 or later.
    assert [row["step"] for row in events if row["event"] == "train_begin"][0] == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_when_all_are_lost_at_once_the_checkpoint_counts_and_the_lost_steps_are_told(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
):
    faults: Faults = {"0": ("update", 11), "1": ("update", 11)}  # the first call compiles
    events = supervised(tmp_path / "run", 2, faults, monkeypatch)
    check_same_bits(tmp_path / "run", undisturbed)
    lost = [row for row in events if row["event"] == "resized" and row["members_before"]]
    assert lost[0]["steps_lost"] == 1 and lost[0]["step"] == 9, "checkpoints are of steps 4 and 8, and 9 was made"
