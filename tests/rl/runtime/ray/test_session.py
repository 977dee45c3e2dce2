"""Ray's own processes are killed: Ray is restarted, and the run continues to the same bits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.runtime.ray.runtime import run_ray
from rl.runtime.ray.session import ray_session
from tests.rl.runtime.ray.command import ROOT
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, run_here, slow
from tests.rl.tiny import tiny_experiment

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]


def ours(name: str) -> list[psutil.Process]:
    """Return Ray processes that this one has started."""
    found = [child for child in psutil.Process().children() if child.name() == name]
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]


class Killer:
    """A kill of one Ray process after the other, each when two more updates are done."""

    def __init__(self, *names: str):
        self.names, self.killed = list(names), list[psutil.Process]()
        self.since = 0

    def __call__(self, step: int) -> None:
        if self.names and step >= self.since + 2:
            [process] = ours(self.names.pop(0))
            process.send_signal(signal.SIGKILL)
            self.killed.append(process)
            self.since = step


def run_with(path: Path, look: Callable[[int], None], num_steps: int) -> list[str]:
    """Return the lines printed, except for waits."""
    cfg, said = slow(num_steps=num_steps, workers=1), list[str]()
    cfg.trainer.checkpoint.set(save_every=2)
    with RunDirectory.open(path, to_text(cfg)) as run:
        assert run_ray(cfg.build(), run, lambda: False, look, said.append) == num_steps
    return [line for line in said if not line.startswith("waiting ")]


def test_the_raylet_and_the_gcs_server_are_killed_and_the_run_continues(tmp_path: Path) -> None:
    expected = run_here(tmp_path / "expected", tiny_experiment(num_steps=8, evaluation=None))
    killer = Killer("raylet", "gcs_server")
    said = run_with(tmp_path / "run", killer, 8)
    assert_same_outcome(tmp_path / "run", expected)
    raylet, gcs = killer.killed
    assert [line.partition(" died at update ")[0] for line in said] == [
        f"Ray's raylet (pid {raylet.pid}), which starts the roles,",
        f"Ray's gcs_server (pid {gcs.pid}), which knows where the roles are,",
    ]
    assert all(line.endswith("; restarting Ray and all roles from the last checkpoint") for line in said)
    assert len(events(tmp_path / "run", "session_lost")) == 2
    assert events(tmp_path / "run", "died") == [] and ours("raylet") == ours("gcs_server") == []


def test_a_driver_without_a_parent_outlives_its_raylet(tmp_path: Path) -> None:
    """Under init or in a container Ray would mistake the parent that is gone for the raylet, and end the driver."""
    run = tmp_path / "run"
    command = f"{sys.executable} -m tools.cli rl tests.chaos.experiments:endless --run-dir {run}"
    shell = ["sh", "-c", f"{command} > {tmp_path}/said 2>&1 & echo $!"]
    environ = {name: value for name, value in os.environ.items() if name != "RAY_RAYLET_PID"}  # which we have set here
    started = subprocess.run(shell, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    driver = psutil.Process(int(started.stdout))

    def wait_for(event: str, count: int) -> None:
        give_up = time.monotonic() + 300
        while len(events(run, event)) < count:
            assert driver.is_running() and time.monotonic() < give_up, (tmp_path / "said").read_text()
            time.sleep(0.2)

    try:
        wait_for("update", 3)
        [raylet] = [child for child in driver.children(recursive=True) if child.name() == "raylet"]
        raylet.kill()
        wait_for("session_lost", 1)
        wait_for("session", 2)
        wait_for("update", len(events(run, "update")) + 3)
        driver.terminate()
        driver.wait(120)
    finally:
        for process in (*driver.children(recursive=True), driver) if driver.is_running() else ():
            process.kill()


@pytest.fixture
def session() -> Iterator[None]:
    """Open a session that is not the run's own."""
    with ray_session():
        yield


@pytest.mark.usefixtures("session")
def test_a_session_that_the_run_did_not_start_is_not_restarted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Ray's raylet \(pid \d+\).*died; it belongs to a Ray cluster"):
        run_with(tmp_path, Killer("raylet"), 8)
    [lost] = ours("gcs_server")
    assert lost.is_running(), "it is left alone"
