"""Elastic workers: they join a run from outside with `axl worker`, and leave."""

import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.runtime.ray.elastic_workers import run_elastic_worker
from rl.runtime.ray.runtime import run_ray
from tests.rl.runtime.ray.command import ROOT
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, run_here, slow
from tests.rl.tiny import tiny_experiment, tiny_run
from tools import cli

pytestmark = pytest.mark.timeout(900)  # half a dozen processes each: a busy machine needs long


def join(path: Path, name: str) -> subprocess.Popen[str]:
    """Start `axl worker`, like a user in another terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "tools.cli", "worker", str(path), "--name", name],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.full
def test_a_run_without_workers_makes_progress_while_elastic_workers_are_there(tmp_path: Path) -> None:
    expected = run_here(tmp_path / "expected", tiny_experiment(num_steps=8, evaluation=None))
    path, cfg = tmp_path / "run", slow(num_steps=8, workers=0, groups_per_lease=1)
    workers: list[subprocess.Popen[str]] = []
    modes: list[int] = []
    over = threading.Event()

    def look(step: int) -> None:
        cluster = path / "cluster.json"
        if not workers and cluster.exists():
            modes.append(stat.S_IMODE(cluster.stat().st_mode))
            workers.append(join(path, "early"))
        if len(workers) == 1 and step >= 3 and workers[0].poll() is None and not over.is_set():
            over.set()
            workers[0].send_signal(signal.SIGTERM)
        if len(workers) == 1 and over.is_set() and workers[0].poll() is not None:
            workers.extend((join(path, "late"), join(path, "later")))

    said: list[str] = []
    try:
        with RunDirectory.open(path, to_text(cfg)) as run:
            assert run_ray(cfg.build(), run, lambda: False, look, said.append) == 8
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0, 0], outputs
    assert outputs[0].endswith("\nleft\n")
    assert "the run is over\n" in outputs[1] + outputs[2]
    assert_same_outcome(path, expected)
    assert modes == [0o600] and not (path / "cluster.json").exists()
    [leave] = events(path, "shutdown", "early")
    assert leave["seconds"] < 25
    assert not events(path, "silent"), "it left in order"
    [joined] = events(path, "joined", "early")
    assert any(line == f"early joined: its first rollouts came after {joined['join_s']:.1f} s" for line in said)
    assert {row["role"] for row in events(path, "score")} & {"late", "later"}


def test_without_an_active_run_there_is_nothing_to_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="is not a run directory: it has no config.txt"):
        run_elastic_worker(tmp_path)
    with tiny_run(tmp_path / "run", tiny_experiment()) as run:
        assert cli.main(["worker", str(run.path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"axl: error: no run under Ray is active in {run.path} (it has no cluster.json); ")
