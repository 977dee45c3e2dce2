"""The supervised trainer as two processes over one mesh."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config_text import to_text
from axlearn_like.evaluation import LossEvaluator
from axlearn_like.input import SupervisedInput
from axlearn_like.metrics import read_rows
from axlearn_like.run_directory import RunDirectory, RunDirectoryError
from axlearn_like.trainer import Trainer
from mesh.devices import devices_for
from mesh.joining import join
from tests.axlearn_like.tiny import ROOT, Counting, Preemption, tiny_trainer
from tests.elsewhere import in_two_processes

STEPS = 8
MESH = {"data": 2, "fsdp": 2}


def config(mesh: dict[str, int]) -> Trainer.Config:
    held_out = SupervisedInput.Config(source=Counting.Config(examples=20), seq_len=16, batch_size=8)
    evaluator = LossEvaluator.Config(input=held_out, batches=1, every=4)
    return tiny_trainer(STEPS, mesh=mesh, evaluators=(Preemption.Config(), evaluator))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_sigterm_to_one_stops_both_and_both_go_on_to_what_one_process_learns(tmp_path: Path):
    taken = RunDirectory.open(tmp_path / "taken", to_text(config(MESH)))
    for index, found in enumerate(in_two_processes(as_one_of_two, str(tmp_path), 5)):
        assert found["row"]["step"] == 5 and not found["row"]["finished"]
        assert f"run directory {taken.path} is in use by process {os.getpid()}" in found["taken"], index
    assert events(tmp_path / "run") == [("start", 0, None), ("stop", 5, "another process")]
    leader, other = in_two_processes(as_one_of_two, str(tmp_path), None)
    assert leader["row"]["finished"] and other["row"]["finished"]
    assert events(tmp_path / "run")[2:] == [("start", 5, None), ("stop", STEPS, "done")]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["5", "8"]

    config({}).build().run(tmp_path / "one", progress=False)
    ours, expected = rows(tmp_path / "run"), rows(tmp_path / "one")
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for row, other in zip(ours, expected, strict=True):  # sums over processes have another order
        names = ["loss", "accuracy", "grad_norm", "tokens", *["eval_loss"] * (row["step"] % 4 == 0)]
        assert [row[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4), row["step"]


def as_one_of_two(address: str, index: int, folder: str, leave_at: int | None) -> dict[str, Any]:
    """Trains; the second process is sent SIGTERM at a step."""
    devices_for(MESH, 2)
    join(address, index, 2, role="trainer")
    trainer, found = config(MESH).build(), {}
    try:
        trainer.run(Path(folder) / "taken", progress=False)
    except RunDirectoryError as error:
        found["taken"] = str(error)
    if leave_at is not None and index == 1:
        os.environ |= {"TINY_STEP": str(leave_at), "TINY_SIGNAL": str(int(signal.SIGTERM)), "TINY_AWAIT": str(ROOT)}
    found["row"] = trainer.run(Path(folder) / "run", progress=False)
    return found


def events(path: Path) -> list[tuple[str, int, str | None]]:
    """Of starts and stops."""
    told = [row for row in read_rows(path / "events.jsonl") if row["event"] in ("start", "stop")]
    return [(row["event"], row["step"], row.get("reason")) for row in told]


def rows(path: Path) -> list[dict[str, Any]]:
    return read_rows(path / "metrics.jsonl")
