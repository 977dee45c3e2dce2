"""The machine of a launched process: rank, chips, and the lock that it left on another one."""

import argparse
import json
from pathlib import Path

import pytest

from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from tests.tools.launch.process.started import start
from tools.launch.process import machine


def given(**values: int) -> argparse.Namespace:
    return argparse.Namespace(**{"hosts": 4, "slices": 2, "chips": 0, **values})


def test_a_machine_with_other_chips_is_worth_a_restart_and_no_user_error(tmp_path: Path):
    done = start(tmp_path, "train", "--chips", "4", "--", "true", JAX_PLATFORMS="")
    output, _ = done.communicate(timeout=60)
    assert (done.returncode, output) == (70, "axl: this machine shows 0 TPU chips or GPUs; expected 4\n")
    assert not (tmp_path / "launch").exists()


@pytest.mark.parametrize("folder", ["", "gpu", "vfio"])
def test_chips_are_counted_by_their_files(folder: str, tmp_path: Path):
    names = {
        "": ["accel0", "accel1", "accel12", "null", "7"],
        "gpu": ["nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm", "7"],
        "vfio": ["0", "1", "2", "vfio"],
    }
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in names[folder]:
        (tmp_path / folder / name).touch()
    assert machine.seen_chips(tmp_path / "gpu" if folder == "gpu" else tmp_path) == 3


@pytest.mark.parametrize("index", ["4", "-1", "x"])
def test_an_index_beyond_the_slice_is_refused(index: str):
    with pytest.raises(machine.MachineError, match="expected"):
        machine.rank(given(), {"JOB_COMPLETION_INDEX": index})


def test_a_process_that_restarts_on_another_machine_takes_over_the_lock_that_it_left(tmp_path: Path):
    lock = tmp_path / "run.lock"

    def held_by(host: str) -> None:
        run = RunDirectory.open(tmp_path, "config")
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": host}))
        del run

    held_by("others")
    machine.release_lock(tmp_path, "first")
    with pytest.raises(RunDirectoryError, match="in use by process .* on others"):
        RunDirectory.open(tmp_path, "config")
    lock.unlink()
    held_by("first")  # killed: nobody took it away
    machine.release_lock(tmp_path, "second")
    RunDirectory.open(tmp_path, "config").close()
