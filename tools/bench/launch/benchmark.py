"""Seconds of a plan and of a dry run, from submission to the first update, and from a lost machine to its next rollout.

Manifests are carried out on this machine (`--on local`): head, trainer and two workers, each with a Ray node.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axlearn_like.run.metrics import read_rows
from tools.launch.control.handle import LaunchedRun, launch
from tools.launch.launch import Launch
from tools.launch.local.pod import MARK, marked
from tools.launch.plan import plan_launch
from tools.launch.submission import submission

JOB = "tools.bench.launch.job:job"
_ROOT = Path(__file__).parents[3]
_LARGE = "qwq_32b_rl --tpu v5p:8x8x8 --workers 64 --worker-tpu v5p:2x2x2 --worker-capacity spot".split()
_LIMIT = 600.0  # seconds
_KILL_AT = 5  # updates

Say = Callable[[str], None]


def measure(say: Say, *, quick: bool = False) -> dict[str, Any]:
    """Return the figures; `quick`: of the plan alone."""
    found: dict[str, Any] = {**measure_plan(say)}
    if quick:
        return found
    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder)
        undisturbed = run_alone(storage / "alone")
        for name in ("cold", "warm"):
            say(f"a {name} run")
            found |= {f"{key}{'_cold' if name == 'cold' else ''}": value for key, value in run_and_lose(storage, name)}
        same = [checksums(storage / name) == checksums(undisturbed) for name in ("cold", "warm")]
    return {**found, "bit_identical": all(same)}


def measure_plan(say: Say) -> dict[str, float | int]:
    """Return the seconds of a plan for 1,024 chips with all its files, and of the command from start to end."""
    cfg = Launch.Config(
        experiment="qwq_32b_rl",
        tpu="v5p:8x8x8",
        workers=64,
        worker_tpu="v5p:2x2x2",
        worker_capacity="spot",
    )
    began = time.monotonic()
    plan = plan_launch(cfg)
    submission(cfg, plan)
    seconds = time.monotonic() - began
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tools.cli", "launch", *_LARGE, "--dry-run", f"{folder}/out"]
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True, capture_output=True)
    found: dict[str, float | int] = {"plan_chips": plan.as_dict()["chips"], "plan_s": round(seconds, 2)}
    found["dry_run_s"] = round(time.monotonic() - began, 2)
    say(f"plan of {found['plan_chips']} chips: {found['plan_s']} s, the command {found['dry_run_s']} s")
    return found


def run_alone(path: Path) -> Path:
    """Run the job undisturbed, all roles in one process."""
    command = [sys.executable, "-m", "axlearn_like", "rl", JOB, "--runtime", "inprocess", "--run-dir", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return path


def run_and_lose(storage: Path, name: str) -> list[tuple[str, float]]:
    """Launch the job, take a worker's machine away, and return what was measured when the run has ended."""
    cfg = Launch.Config(
        experiment=JOB,
        name=name,
        on="local",
        tpu="v6e:1x1",
        workers=2,
        worker_tpu="v6e:1x1",
        worker_capacity="spot",
        storage=f"dir:{storage}",
    )
    path, began = storage / name, time.time()
    run = launch(cfg, say=lambda line: None)
    try:
        _until(lambda: len(updates(path)) >= _KILL_AT, run)
        first = updates(path)[0]["time"]
        killed = time.time()
        lose_machine(run, f"{name}-worker-1")
        _until(lambda: rollouts_since(path, killed), run)
        back = rollouts_since(path, killed)[0]["time"]
        states = [one.state for one in run.wait(_LIMIT)]
        if states != ["completed"] * 4:
            raise RuntimeError(f"the run ended as {states}: {run.logs(lines=10)}")
    finally:
        run.stop(lambda line: None)
    return [("submit_to_update_s", round(first - began, 1)), ("restart_to_rollout_s", round(back - killed, 1))]


def lose_machine(run: LaunchedRun, jobset: str) -> None:
    """Kill everything that the first Pod of a JobSet has started, as the loss of its machine does."""
    pods = [pod for pod in run.api.pods(run.name) if pod["metadata"]["name"].startswith(f"{jobset}-")]
    first = next(pod for pod in pods if pod["status"]["phase"] == "Running")
    variables = Path(f"/proc/{first['metadata']['annotations']['axl/pid']}/environ").read_text().split("\0")
    mark = next(one.partition("=")[2] for one in variables if one.startswith(f"{MARK}="))
    for pid in list(marked(mark)):
        os.kill(pid, signal.SIGKILL)


def updates(path: Path) -> list[dict[str, Any]]:
    """Return the rows of all updates so far."""
    rows = read_rows(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    return [row for row in rows if row["phase"] == "rl"]


def rollouts_since(path: Path, moment: float) -> list[dict[str, Any]]:
    """Return what the lost worker has generated in its new process; its name need not be the machine's."""
    rows = [row for row in read_rows(path / "events.jsonl") if row["time"] > moment]
    lost = [row["target"] for row in rows if row["event"] == "died"]
    mine = [row for row in rows if row["role"] in lost]
    starts = [row["time"] for row in mine if row["event"] == "start"]
    return [row for row in mine if starts and row["event"] == "generate" and row["time"] > starts[0]]


def checksums(path: Path) -> Any:
    """Return shape, type and checksum of every array of a run's last checkpoint."""
    folder = path / "checkpoints" / "rl"
    last = max(int(one.name) for one in folder.iterdir() if one.name.isdecimal())
    return json.loads((folder / str(last) / "manifest" / "metadata").read_text())


def _until(done: Callable[[], Any], run: LaunchedRun) -> None:
    deadline = time.monotonic() + _LIMIT
    while not done():
        states = {one.state for one in run.status()}
        if time.monotonic() > deadline or "failed" in states or states == {"completed"}:
            raise RuntimeError(f"no progress: {run.logs(lines=10)}")
        time.sleep(0.1)
