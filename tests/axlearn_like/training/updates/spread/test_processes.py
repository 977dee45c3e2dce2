"""Spread experts in real processes that are killed by SIGKILL, against the same run in one process, undisturbed."""

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
from tests.axlearn_like.training.updates.spread.process import config

STEPS = 26
Faults = dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    config(STEPS).build().run(folder, progress=False)
    return folder


def supervised(
    folder: Path, members: int, faults: Faults, monkeypatch: pytest.MonkeyPatch, copies: int = 2
) -> list[dict[str, Any]]:
    """Run the members to the end, and return the events."""
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    monkeypatch.setenv("COPIES", str(copies))
    command = [sys.executable, "-m", "tests.axlearn_like.training.updates.spread.process", str(folder), str(STEPS)]
    with RunDirectory.open(folder, to_text(config(STEPS, copies))) as run:
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
        pytest.param({"1": ("forward", 15)}, id="in a layer"),
        pytest.param({"0": ("backward", 14)}, id="the first process, in a layer backward"),
        pytest.param({"2": ("exchange", 60)}, id="when it has sent to one of two"),
        pytest.param({"1": ("sums", 100)}, id="when it waits for others"),
        pytest.param({"1": ("update", 9)}, id="before its update, when others make theirs"),
    ],
)
def test_killed_members_change_no_bit_and_survivors_fetch_the_experts_that_they_lack(
    tmp_path: Path, undisturbed: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
):
    events = supervised(tmp_path / "run", 3, faults, monkeypatch)
    check_same_bits(tmp_path / "run", undisturbed)
    ended = [row for row in events if row["event"] == "member_ended"]
    assert sorted(str(row["member"]) for row in ended) == sorted(faults) and {row["status"] for row in ended} == {-9}
    resized = [row for row in events if row["event"] == "resized"]
    assert resized[0]["members"] == resized[-1]["members"] == 3
    assert min(row["members"] for row in resized) < 3 and all(row["steps_lost"] == 0 for row in resized)
    placed = [row for row in events if row["event"] == "experts_placed"]
    # Six slots of two members have room for one of each of the four experts, nine for two.
    assert {(row["members"], row["copies"]) for row in placed} == {(2, 1), (3, 2)}
    assert all(row["moves"] > 0 for row in placed[1:] if row["step"] == resized[1]["step"])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_with_three_copies_two_are_lost_at_once(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch):
    faults: Faults = {"0": ("forward", 15), "2": ("moves", 2)}  # the second when the first is gone, or at a new plan
    events = supervised(tmp_path / "run", 4, faults, monkeypatch, copies=3)
    check_same_bits(tmp_path / "run", undisturbed)
    assert all(row["steps_lost"] == 0 for row in events if row["event"] == "resized")
    assert [row for row in events if row["event"] == "experts_placed"][0]["copies"] == 3


@pytest.mark.full
@pytest.mark.timeout(900)
def test_when_all_who_had_an_expert_are_lost_the_checkpoint_counts(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
):
    # Two of three with two copies of each expert: some expert had both of its copies there.
    faults: Faults = {"0": ("update", 11), "1": ("update", 11)}
    events = supervised(tmp_path / "run", 3, faults, monkeypatch)
    check_same_bits(tmp_path / "run", undisturbed)
    lost = [row for row in events if row["event"] == "experts_lost"]
    assert lost and lost[0]["experts"] and any(row.get("steps_lost") for row in events if row["event"] == "resized")
