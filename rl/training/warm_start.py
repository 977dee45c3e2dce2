"""The supervised phase before RL: a run of the supervised trainer inside the run, on the trainer's devices."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.training.trainer import Trainer
from rl.controller.evaluations import result_path
from rl.training.trainer import PolicyTrainer


def warm_start_directory(run: RunDirectory) -> Path:
    """Return the run directory of the supervised phase."""
    return run.path / "warm_start"


def check_warm_start(cfg: Trainer.Config, trainer: PolicyTrainer.Config, devices: Sequence[Any] | None) -> None:
    """Refuse a supervised phase that does not fit the trainer's processes and devices (UserError: names the field)."""
    if trainer.processes > 1:
        cfg.require("mesh", bool(cfg.mesh), f"axes, such as {{'data': -1}}: {trainer.processes} processes share them")
        devices = devices or trainer.described_devices()
    if devices is None or devices:
        cfg.check_sizes(devices)


def is_warm_start_due(cfg: Trainer.Config | None, run: RunDirectory) -> bool:
    """Return True if there is a supervised phase and no later one has begun. It may be complete."""
    return cfg is not None and not result_path(run, "before").exists() and latest_step(run.checkpoints / "rl") is None


@contextmanager
def open_warm_start(cfg: Trainer.Config | None, run: RunDirectory) -> Iterator[None]:
    """Hold the directory of the supervised phase open for as long as roles may work in it, if it is due."""
    if cfg is None or not is_warm_start_due(cfg, run):
        yield
        return
    with RunDirectory.open(warm_start_directory(run), to_text(cfg), force=run.force):
        yield


def run_warm_start(cfg: Trainer.Config | None, run: RunDirectory, stop: Callable[[], bool]) -> bool:
    """Run the supervised phase, if due, in a directory that is held open; returns False if it was stopped."""
    if cfg is None or not is_warm_start_due(cfg, run):
        return True
    inner = RunDirectory.attach(warm_start_directory(run))
    return bool(Trainer(cfg).run(inner, progress=False, stop=stop)["finished"])


def latest_step(checkpoints: Path) -> int | None:
    """Return the step of the newest complete checkpoint in this folder, or None."""
    return Checkpointer.Config().build(directory=checkpoints).latest_step() if checkpoints.is_dir() else None
