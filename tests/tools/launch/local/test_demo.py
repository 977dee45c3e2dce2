"""The demo as its manifests say: head, trainer of two processes, workers, one killed with all it started, one added.

A JobSet for each machine, which restarts alone.
The rendered commands run: they unpack the archive, find their ranks and each other, and make the same weights.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run.metrics import read_rows
from tests.rl.runtime.ray.experiments import checksums, metrics
from tools.launch.control.handle import LaunchedRun, find_run, launch
from tools.launch.launch import Launch
from tools.launch.local.pod import MARK, marked

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

MINE = '''
import time

from axlearn_like.training.alignment.reference import FrozenCopy
from experiments.demo.config import demo
from rl.objective.presets import grpo
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier


PAUSE = 0.1 if "/launch/cluster/roots/" in __file__ else 0.0  # seconds


def share(problem_id: int, answer: str) -> float:
    """The share of ASCII characters, slowly where it was launched: time to kill somebody."""
    time.sleep(PAUSE)
    return sum(character.isascii() for character in answer) / max(len(answer), 1)


def mine():
    cfg = demo(steps=30).set(warm_start=None, evaluation=None, groups_per_lease=1)
    cfg.set(prompts_per_step=4, samples_per_prompt=4)
    cfg.trainer.set(mesh={"data": 2})
    cfg.trainer.checkpoint.set(save_every=5)
    cfg.verifier = Verifier.Config(scorer=FunctionScorer.Config(function=share), processes=1)
    return cfg


def compared():
    cfg = mine().set(objective=grpo(kl_coef=0.5))
    cfg.trainer.set(mesh={}, reference=FrozenCopy.Config())
    return cfg
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo without its warm start, with a reward of the user's own, in a file that travels with the code."""
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(MINE)
    return f"{path}:mine"


@pytest.fixture(scope="module")
def undisturbed(mine: str, tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """The same in one process that has the devices of both processes of the trainer."""
    return run_here(mine, tmp_path_factory.mktemp("undisturbed") / "run", 2, checkout)


def lose_machine(run: LaunchedRun, jobset: str) -> None:
    """Kill everything that the first Pod of a JobSet has started, as the loss of its machine does."""
    pods = [pod for pod in run.api.pods(run.name) if pod["metadata"]["name"].startswith(f"{jobset}-")]
    first = next(pod for pod in pods if pod["status"]["phase"] == "Running")
    variables = Path(f"/proc/{first['metadata']['annotations']['axl/pid']}/environ").read_text().split("\0")
    mark = next(one.partition("=")[2] for one in variables if one.startswith(f"{MARK}="))
    for pid in list(marked(mark)):
        os.kill(pid, signal.SIGKILL)


def run_here(experiment: str, path: Path, devices: int, checkout: Path) -> Path:
    """Run an experiment in one process; returns its run directory."""
    command = [sys.executable, "-m", "axlearn_like", "rl", experiment, "--runtime", "inprocess", "--run-dir", str(path)]
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def submission(mine: str, storage: Path) -> Launch.Config:
    """Two machines of the trainer, two of workers."""
    return Launch.Config(
        experiment=mine,
        on="local",
        devices="v6e:1x1",
        slices=2,
        workers=2,
        worker_devices="v6e:1x1",
        worker_capacity="spot",
        storage=f"dir:{storage}",
    )


def test_a_worker_that_is_killed_restarts_alone_and_the_result_is_the_same_to_the_bit(
    mine: str, undisturbed: Path, tmp_path: Path
):
    run = launch(submission(mine, tmp_path))
    try:
        path = tmp_path / "mine"
        wait_for(lambda: updates(path) >= 3, run)
        before, restarted = pids(run), restarts(run)  # on a busy machine Ray may not start in its 30 s: once more, then
        lose_machine(run, "mine-worker-1")
        began = time.time()
        wait_for(lambda: restarts(run)["mine-worker-1"] == restarted["mine-worker-1"] + 1, run)
        found = run.wait(600)
        assert [one.state for one in found] == ["completed"] * 4, run.logs(lines=20)
        after, now = pids(run), restarts(run)
        assert [name for name in now if now[name] != restarted[name]] == ["mine-worker-1"]
        assert [name for name in before if after[name] != before[name]] == ["mine-worker-1-node-0-0"]
        assert len(before) == 5, "the trainer has two processes"
        rows = [row for row in read_rows(path / "events.jsonl") if row["event"] == "start" and row["time"] > began]
        # Ray has placed a worker of either name on that machine; on a busy one the run may end before it is back.
        assert {row["role"] for row in rows} in ({"worker-0"}, {"worker-1"}, set[str]()), "no other role was restarted"
        assert figures(path) == figures(undisturbed)
        assert checksums(path) == checksums(undisturbed)
    finally:
        run.stop()


def test_a_worker_that_is_added_joins_the_run_and_changes_nothing(mine: str, undisturbed: Path, tmp_path: Path):
    cfg = Launch.Config(
        experiment=mine,
        on="local",
        devices="v6e:1x1",
        slices=2,
        workers=1,
        worker_devices="v6e:1x1",
        storage=f"dir:{tmp_path}",
    )
    run, path, said = launch(cfg), tmp_path / "mine", list[str]()
    try:
        wait_for(lambda: updates(path) >= 1, run)
        find_run(str(path)).add_workers(1, said.append)  # as `axl launch add-worker` does
        assert said == ["added mine-worker-1"]
        wait_for(lambda: "worker-1" in {row["role"] for row in events(path, "joined")}, run)
        assert updates(path) < 30, "the run was active"
        found = run.wait(600)
        assert [(one.name, one.state) for one in found] == [
            (f"mine-{name}", "completed") for name in ("head", "trainer", "worker-0", "worker-1")
        ], run.logs(lines=20)
        assert len([row for row in events(path, "generate") if row["role"] == "worker-1"]) > 1
        assert figures(path) == figures(undisturbed)
        assert checksums(path) == checksums(undisturbed)
    finally:
        run.stop()


def test_a_reference_that_is_killed_restarts_alone_and_the_result_is_the_same_to_the_bit(
    mine: str, tmp_path: Path, checkout: Path
):
    experiment = mine.replace(":mine", ":compared")
    alone = run_here(experiment, tmp_path / "alone", 1, checkout)
    cfg = submission(experiment, tmp_path).set(slices=1, workers=1, reference_devices="v6e:1x1")
    run, path = launch(cfg), tmp_path / cfg.run_name
    try:
        wait_for(lambda: updates(path) >= 3, run)
        before, restarted = pids(run), restarts(run)
        began, name = time.time(), f"{cfg.run_name}-reference"
        lose_machine(run, name)
        wait_for(lambda: restarts(run)[name] == restarted[name] + 1, run)
        assert {one.state for one in run.wait(600)} == {"completed"}, run.logs(lines=20)
        after, now = pids(run), restarts(run)
        assert [one for one in now if now[one] != restarted[one]] == [name]
        assert [one for one in before if after[one] != before[one]] == [f"{name}-node-0-0"]
        rows = [row for row in events(path, "start") if row["time"] > began]
        assert [row["role"] for row in rows] == ["reference"], "which was on its own machine, and waited for another"
        assert {row["role"] for row in events(path, "reference")} == {"reference"}
        assert figures(path) == figures(alone)
        saved = checksums(alone)
        assert any(name.startswith("reference/") for name in saved.pop("constant")), (
            "which a trainer with a role has not"
        )
        assert checksums(path) == saved
    finally:
        run.stop()


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(path / "events.jsonl") if row["event"] == kind]


def figures(path: Path) -> list[dict[str, Any]]:
    """Return the figures of all updates, without a mean over both processes, whose order of sums is another."""
    return [{name: value for name, value in row.items() if name != "logprob_diff_mean"} for row in metrics(path)]


def pids(run: LaunchedRun) -> dict[str, str]:
    """Return the first process of each Pod by its stable name; of a restarted one, the newest."""
    return {
        pod["metadata"]["name"].rpartition("-")[0]: pod["metadata"]["annotations"]["axl/pid"]
        for pod in run.api.pods(run.name)
    }


def restarts(run: LaunchedRun) -> dict[str, int]:
    return {one.name: one.restarts for one in run.status()}


def updates(path: Path) -> int:
    rows = read_rows(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    return max((row["step"] for row in rows if row["phase"] == "rl"), default=0)


def wait_for(condition: Any, run: LaunchedRun, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        states = [one.state for one in run.status()]
        assert time.monotonic() < deadline and "failed" not in states, run.logs(lines=20)
        time.sleep(0.2)
