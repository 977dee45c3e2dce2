"""The supervised trainer as two processes over one mesh."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from axlearn_like.config import to_text
from axlearn_like.input import SupervisedInput
from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.trainer import Trainer
from mesh.devices import configure_cpu_devices
from mesh.distributed import join
from tests.axlearn_like.tiny import ROOT, Counting, Preemption, tiny_trainer
from tests.elsewhere import elsewhere, in_two_processes

pytestmark = pytest.mark.numerics

STEPS = 8
MESH = {"data": 2, "fsdp": 2}


class Indexed(Counting):
    """A source that knows the lengths without reading, and records which examples were read."""

    class Config(Counting.Config):
        name: str = "train"

    read_by_name: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.digest, self.longest = f"{cfg.examples} numbers", (cfg.max_length, "somewhere")
        self._read = self.read_by_name.setdefault(cfg.name, [])

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self._lengths[indices]

    def learned(self, indices: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        return stops - np.maximum(starts, 1)

    def read(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        self._read.append(index)
        example = self[index]
        return example["tokens"][start:stop], example["loss_mask"][start:stop]


def config(mesh: dict[str, int]) -> Trainer.Config:
    held_out = SupervisedInput.Config(source=Indexed.Config(examples=20, name="eval"), seq_len=16, batch_size=8)
    evaluator = LossEvaluator.Config(input=held_out.set(prefetch=0), batches=1, every=4)
    cfg = tiny_trainer(STEPS, mesh=mesh, evaluators=(Preemption.Config(), evaluator))
    cfg.input.set(source=Indexed.Config(), prefetch=0)  # nothing is read ahead of its step
    return cfg


@pytest.mark.full
@pytest.mark.timeout(900)
def test_sigterm_to_one_stops_both_and_both_go_on_to_what_one_process_learns(tmp_path: Path):
    taken = RunDirectory.open(tmp_path / "taken", to_text(config(MESH)))
    for index, found in enumerate(in_two_processes(as_one_of_two, str(tmp_path), 5)):
        assert found["row"]["step"] == 5 and not found["row"]["finished"]
        assert f"run directory {taken.path} is in use by process {os.getpid()}" in found["taken"], index
        assert found["read"] == read_in(config(MESH).input, half(index), 0, 5)
        assert found["read_to_evaluate"] == read_in(evaluated(), half(index), 0, 1)
    assert events(tmp_path / "run") == [("train_begin", 0, None), ("train_end", 5, "another process")]
    shutil.copytree(tmp_path / "run", tmp_path / "later_one")
    leader, other = in_two_processes(as_one_of_two, str(tmp_path), None)
    assert leader["row"]["finished"] and other["row"]["finished"]
    for index, found in enumerate((leader, other)):
        assert found["read"] == read_in(config(MESH).input, half(index), 5, STEPS)
    assert events(tmp_path / "run")[2:] == [("train_begin", 5, None), ("train_end", STEPS, "done")]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["5", "8"]

    later = elsewhere(as_the_only_one, str(tmp_path / "later_one"))
    assert later["read"] == read_in(config(MESH).input, range(8), 5, STEPS)
    assert later["input"] == leader["input"] == other["input"]

    config({}).build().run(tmp_path / "one", progress=False)
    expected = rows(tmp_path / "one")
    for run in ("run", "later_one"):
        assert [row["step"] for row in rows(tmp_path / run)] == list(range(1, STEPS + 1))
        for row, other in zip(rows(tmp_path / run), expected, strict=True):  # sums over processes have another order
            names = ["loss", "accuracy", "grad_norm", "tokens", *["eval_loss"] * (row["step"] % 4 == 0)]
            assert [row[n] for n in names] == pytest.approx([other[n] for n in names], rel=1e-4), (run, row["step"])
            assert (row["packing"], row["epoch"]) == (other["packing"], other["epoch"])


def as_one_of_two(address: str, index: int, folder: str, leave_at: int | None) -> dict[str, Any]:
    """Train as one of two processes; the second receives SIGTERM at a step."""
    configure_cpu_devices(MESH, 2)
    join(address, index, 2, role="trainer")
    trainer, found = config(MESH).build(), {}
    try:
        trainer.run(Path(folder) / "taken", progress=False)
    except RunDirectoryError as error:
        found["taken"] = str(error)
    if leave_at is not None and index == 1:
        os.environ |= {"TINY_STEP": str(leave_at), "TINY_SIGNAL": str(int(signal.SIGTERM)), "TINY_AWAIT": str(ROOT)}
    return found | trained(trainer, Path(folder) / "run")


def as_the_only_one(run: str) -> dict[str, Any]:
    """Train on the same mesh in one process."""
    configure_cpu_devices(MESH, 1)
    jax.config.update("jax_num_cpu_devices", 4)
    return trained(config(MESH).build(), Path(run))


def trained(trainer: Trainer, run: Path) -> dict[str, Any]:
    """The last row, which examples were read, and where the input was left."""
    row = trainer.run(run, progress=False)
    extras = (run / "checkpoints" / str(row["step"]) / "extras" / "metadata").read_text()
    read, position = Indexed.read_by_name, json.loads(extras)["input"]
    return {"row": row, "read": read["train"], "read_to_evaluate": read["eval"], "input": position}


def half(index: int) -> range:
    """The rows of a batch of 8 that belong to one of two processes."""
    return range(4 * index, 4 * index + 4)


def evaluated() -> SupervisedInput.Config:
    (found,) = [e.input for e in config(MESH).evaluators if isinstance(e, LossEvaluator.Config)]
    return found


def read_in(cfg: SupervisedInput.Config, rows: range, begin: int, end: int) -> list[int]:
    """The examples in these rows of the batches [begin, end), found by where they lie in whole batches."""
    data, source = cfg.build(), cfg.source.build()
    whole = {tuple(source[i]["tokens"][:-1].tolist()): i for i in range(len(source))}
    batches = [next(data) for _ in range(end)][begin:]
    data.close()
    found = []
    for batch in batches:
        for row in rows:
            tokens, segments = batch["tokens"][row], batch["segment_ids"][row]
            found += [whole[tuple(tokens[segments == n].tolist())] for n in range(1, segments.max() + 1)]
    return found


def events(path: Path) -> list[tuple[str, int, str | None]]:
    """Return event, step and reason of each start and stop."""
    told = [row for row in read_rows(path / "events.jsonl") if row["event"] in ("train_begin", "train_end")]
    return [(row["event"], row["step"], row.get("reason")) for row in told]


def rows(path: Path) -> list[dict[str, Any]]:
    return read_rows(path / "metrics.jsonl")
