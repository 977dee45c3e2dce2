"""Comparison of a disturbed run with the same run undisturbed: equal to the bit, or the differences."""

import json
from pathlib import Path
from typing import Any

from axlearn_like.config import to_text
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from rl.experiment import RLExperiment
from rl.runtime.inprocess import run_inprocess


def make_undisturbed(path: Path, cfg: RLExperiment.Config) -> Path:
    """Run the undisturbed job in this process."""
    with RunDirectory.open(path, to_text(cfg)) as run:
        run_inprocess(cfg.build(), run, lambda: False, lambda step: None)
    return path


def compare(disturbed: Path, calm: Path, step: int) -> dict[str, Any]:
    """Compare every array of the checkpoints of `step`, and the figures of every update up to it."""
    ours, theirs = saved_arrays(disturbed, step), saved_arrays(calm, step)
    rows, expected = figures(disturbed), figures(calm)
    return {
        "bit_identical": ours == theirs and rows == expected,
        "arrays_compared": len(theirs),
        "arrays_different": sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)),
        "updates_different": [row["step"] for row, other in zip(rows, expected, strict=False) if row != other][:20],
    }


def saved_arrays(run: Path, step: int) -> dict[str, Any]:
    """Return shape, dtype and checksum of every array of a checkpoint, the optimizer's too, from its manifest."""
    manifest = json.loads((run / "checkpoints" / "rl" / str(step) / "manifest" / "metadata").read_text())
    return {f"{item}{name}": entry for item, arrays in manifest.items() for name, entry in arrays.items()}


def figures(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the metrics without times."""
    return [without_clock(row) for row in read_rows(run / "metrics.jsonl")]
