"""Members of elastic runs as real processes that are killed by SIGKILL: started, and compared with one process."""

import json
import sys
from collections.abc import Callable
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
from axlearn_like.training.trainer import Trainer

STEPS = 26
Faults = dict[str, tuple[str, int]]


def undisturbed_run(config: Callable[[int], Trainer.Config], factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run in one process."""
    folder = factory.mktemp("undisturbed") / "run"
    config(STEPS).build().run(folder, progress=False)
    return folder


def supervised(
    module: str, cfg: Trainer.Config, folder: Path, members: int, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Run the members, each a process of this module, to the end; returns the events."""
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    monkeypatch.setenv("RUN", str(folder))
    command = [sys.executable, "-m", module, str(folder), str(STEPS)]
    with RunDirectory.open(folder, to_text(cfg)) as run:
        MemberSupervisor(command, members, EventLog(run.events_path), MemberTimeouts(60.0, 240.0)).run()
    return read_rows(folder / "events.jsonl")


def check_same_bits(folder: Path, other: Path) -> None:
    ours, theirs = ([without_clock(row) for row in read_rows(run / "metrics.jsonl")] for run in (folder, other))
    assert [row["step"] for row in theirs] == list(range(1, STEPS + 1))
    assert ours == theirs
    found, expected = (restore_params(run / "checkpoints" / str(STEPS)) for run in (folder, other))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def check_ended(events: list[dict[str, Any]], faults: Faults) -> list[dict[str, Any]]:
    """Check that those were killed that should be, and that all are back at the end; returns the changes of members."""
    ended = [row for row in events if row["event"] == "member_ended"]
    assert sorted(str(row["member"]) for row in ended) == sorted(faults) and {row["status"] for row in ended} == {-9}
    resized = [row for row in events if row["event"] == "resized"]
    assert resized[0]["members"] == resized[-1]["members"] == 3
    assert min(row["members"] for row in resized) < 3 and all(row["steps_lost"] == 0 for row in resized)
    return resized
