"""The directory of the supervised phase: `--force` of the run counts for it too."""

import os
from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from rl.training.warm_start import open_warm_start, warm_start_directory
from tests.axlearn_like.tiny import tiny_trainer
from tests.mesh.files.test_written import AS_ROOT, OTHER

CONFIG = "a: 1\n"


@AS_ROOT
def test_that_of_another_user_needs_force(tmp_path: Path) -> None:
    cfg = tiny_trainer(2)
    with RunDirectory.open(tmp_path, CONFIG) as run, open_warm_start(cfg, run):
        inner = warm_start_directory(run)
    for path in (inner, inner / "checkpoints"):
        os.chown(path, OTHER, OTHER)
    with (
        RunDirectory.open(tmp_path, CONFIG) as run,
        pytest.raises(RunDirectoryError, match=rf"warm_start belongs to user {OTHER}, .* or --force"),
        open_warm_start(cfg, run),
    ):
        pass
    with RunDirectory.open(tmp_path, CONFIG, force=True) as run, open_warm_start(cfg, run):
        assert inner.stat().st_uid == OTHER


def test_another_config_needs_force(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run, open_warm_start(tiny_trainer(2), run):
        pass
    changed = tiny_trainer(2).set(seed=5)
    with (
        RunDirectory.open(tmp_path, CONFIG) as run,
        pytest.raises(RunDirectoryError, match=r"(?s)another config.*--force"),
        open_warm_start(changed, run),
    ):
        pass
    with RunDirectory.open(tmp_path, CONFIG, force=True) as run, open_warm_start(changed, run):
        assert RunDirectory.attach(warm_start_directory(run)).read_config() == to_text(changed)
