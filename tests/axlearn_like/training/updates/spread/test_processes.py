"""Spread experts in real processes that are killed by SIGKILL, against the same run in one process, undisturbed."""

from pathlib import Path
from typing import Any

import pytest

from tests.axlearn_like.elastic.killed import STEPS, Faults, check_ended, check_same_bits, supervised, undisturbed_run
from tests.axlearn_like.training.updates.spread.process import config


def run_members(
    folder: Path, members: int, faults: Faults, monkeypatch: pytest.MonkeyPatch, copies: int = 2
) -> list[dict[str, Any]]:
    monkeypatch.setenv("COPIES", str(copies))
    module = "tests.axlearn_like.training.updates.spread.process"
    return supervised(module, config(STEPS, copies), folder, members, faults, monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(config, tmp_path_factory)


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
    events = run_members(tmp_path / "run", 3, faults, monkeypatch)
    check_same_bits(tmp_path / "run", undisturbed)
    resized = check_ended(events, faults)
    placed = [row for row in events if row["event"] == "experts_placed"]
    # Six slots of two members have room for one of each of the four experts, nine for two.
    assert {(row["members"], row["copies"]) for row in placed} == {(2, 1), (3, 2)}
    assert all(row["moves"] > 0 for row in placed[1:] if row["step"] == resized[1]["step"])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_with_three_copies_two_are_lost_at_once(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch):
    faults: Faults = {"0": ("forward", 15), "2": ("moves", 2)}  # the second when the first is gone, or at a new plan
    events = run_members(tmp_path / "run", 4, faults, monkeypatch, copies=3)
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
    events = run_members(tmp_path / "run", 3, faults, monkeypatch)
    check_same_bits(tmp_path / "run", undisturbed)
    lost = [row for row in events if row["event"] == "experts_lost"]
    assert lost and lost[0]["experts"] and any(row.get("steps_lost") for row in events if row["event"] == "resized")
