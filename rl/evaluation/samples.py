"""The folder of an evaluation: samples as they are drawn, and the figures from them."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.config import ConfigBase, to_text
from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError, did_you_mean
from mesh.files.written import open_written, replace_file
from rl.protocol.messages import Problem
from rl.tasks.mixture import TaskMixture

Row = dict[str, Any]
SAMPLES = "samples.jsonl"
_RECORD, _RESULT = "evaluation.json", "result.json"


def record_of(tasks_cfg: TaskMixture.Config, tasks: TaskMixture, verifier: ConfigBase[Any]) -> dict[str, Any]:
    """Return what the answers of a folder depend on beside the policy and numbers: tasks, data, verifier."""
    return {"tasks": to_text(tasks_cfg), "data": tasks.digests(), "verifier": to_text(verifier)}


class Samples:
    """The folder of an evaluation: what it is of, samples to read, and its figures."""

    def __init__(self, folder: Path, record: Mapping[str, Any]):
        """Open the folder, or make it.

        Args:
            record: what the figures depend on: policy, tasks, seed, number of samples, sampler.

        Raises:
            UserError: the folder holds an evaluation of something else; names what differs.
        """
        self.folder, self.policy = folder, record.get("policy")
        path = folder / _RECORD
        if path.exists() and self._path.exists():
            before = json.loads(path.read_text())
            for name in sorted({*before, *record}):
                if before.get(name) != record.get(name):
                    raise UserError(
                        f"{folder} holds an evaluation with {name} = {before.get(name)!r}, not {record.get(name)!r}; "
                        "name another folder (--out)"
                    )
        else:
            # An evaluation's own: its logs, and a record that has no answers yet.
            own = {"launch", _RECORD} if path.exists() else {"launch"}
            others = [name for name in sorted(os.listdir(folder)) if name not in own] if folder.is_dir() else []
            if others:
                held = ", ".join(others[:3])
                raise UserError(f"{folder} is of something else, it holds {held}; name a folder of its own (--out)")
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts and answers are in it
            _replace(path, record)
        _drop_torn(self._path)

    @property
    def _path(self) -> Path:
        return self.folder / SAMPLES

    def rows(self) -> list[Row]:
        """Return a row for each problem that has been answered, in order."""
        return read_rows(self._path)

    def answered(self, problems: Sequence[Problem]) -> int:
        """Return how many of the problems have been answered; UserError if they are others, or in another order."""
        done = [row["problem"] for row in self.rows()]
        if done != [problem.id for problem in problems[: len(done)]]:
            raise UserError(f"{self.folder} holds other problems, or in another order; name another folder (--out)")
        return len(done)

    def append(self, row: Row) -> None:
        """Write the row of a problem; one write, which a kill does not tear."""
        with open_written(self._path, "ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the figures."""
        _replace(self.folder / _RESULT, result)


def sample_rows(folder: Path) -> Iterator[Row]:
    """Return the rows of an evaluation's folder; UserError if there are none."""
    rows = read_rows(folder / SAMPLES)
    if not rows:
        near = did_you_mean(folder.name, [one.parent.name for one in folder.parent.glob(f"*/{SAMPLES}")])
        raise UserError(f"{folder} has no samples of an evaluation ({SAMPLES}){near}; see `axl eval --out`")
    return iter(rows)


def earlier_tokens(folder: Path, seed: int) -> dict[int, tuple[np.ndarray, ...]]:
    """Return the tokens of an evaluation's samples by problem id; {}: it drew with another seed, or wrote none down."""
    record = folder / _RECORD
    if not record.exists() or json.loads(record.read_text()).get("seed") != seed:
        return {}
    rows = ((row["problem"], [sample.get("token_ids", ()) for sample in row["samples"]]) for row in sample_rows(folder))
    return {problem: tuple(np.asarray(ids, np.int32) for ids in drawn) for problem, drawn in rows}


def _drop_torn(path: Path) -> None:
    """Cut off a last line that has no end."""
    if path.exists():
        data = path.read_bytes()
        if (end := data.rfind(b"\n") + 1) < len(data):
            os.truncate(path, end)


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(value, indent=2) + "\n")
