"""`--on slurm`: what the scripts decide, and whole runs by commands of Slurm that start the processes here."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from axlearn_like.run.metrics import read_rows
from mesh import UserError
from tests.tools.launch.slurm.fake import end, install, jobs, notice
from tools import cli
from tools.launch.control.handle import find_run
from tools.launch.launch import Launch
from tools.launch.plan import plan_launch
from tools.launch.slurm.batch import batches

pytestmark = pytest.mark.timeout(900)
SFT = ("demo_sft", "--on", "slurm", "--gpu", "h100:1", "--slices", "2")


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The jobs of commands that are first on PATH."""
    found = install(tmp_path / "slurm")
    here = f"{tmp_path / 'slurm'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", here)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(tmp_path)
    yield found
    end(found)


def wait(done: Callable[[], bool], log: Path, seconds: float = 800) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        texts = [path.read_text()[-3000:] for path in log.glob("*.out")]
        assert time.monotonic() < deadline, "\n".join(texts)
        time.sleep(0.2)


def script(tmp_path: Path, status: int) -> tuple[int, list[str]]:
    """Run the batch script of a trainer whose processes end with a status."""
    cfg = Launch.Config(
        experiment="demo_sft", on="slurm", devices="h100:2", storage="dir:runs", bundle=False, image="x"
    )
    ((_, text),) = batches(cfg, plan_launch(cfg), "").items()
    folder = tmp_path / f"commands{status}"
    folder.mkdir()
    for name, lines in {"srun": f"exit {status}", "scontrol": f"echo $1 >> {folder}/asked; cat {folder}/state"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    (folder / "state").write_text("JobState=RUNNING")
    variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}

    def run(**more: str) -> tuple[int, list[str]]:
        (folder / "asked").write_text("")
        done = subprocess.run(["bash", "-c", text], env=variables | more, capture_output=True, text=True, timeout=20)
        return done.returncode, (folder / "asked").read_text().split()

    found = run()
    assert run(SLURM_RESTART_COUNT="100") == ((status, []) if status in (0, 2) else (2, [])), "a limit of restarts"
    (folder / "state").write_text("JobState=CANCELLED by 1000")
    assert run()[1] == ([] if status in (0, 2) else ["show"]), "one that a user has cancelled stays away"
    return found


@pytest.mark.parametrize(("status", "asked"), [(0, []), (2, []), (143, ["show", "requeue"]), (75, ["show", "requeue"])])
def test_what_has_not_ended_for_good_is_queued_again(
    status: int, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert script(tmp_path, status) == (status, asked)


@pytest.mark.slow
def test_a_machine_without_slurm_is_told_so_and_writes_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert cli.main(["launch", *SFT]) == 2
    assert "there is no sbatch here; submit where Slurm's commands are, or write" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert cli.main(["launch", *SFT, "--dry-run", "out"]) == 0
    assert {"demo-sft-trainer.sbatch", "submit.sh"} < {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": "v6e:1x1"}, "devices: expected GPUs with --on slurm"),
        ({"capacity": "spot"}, "capacity: expected on-demand with --on slurm"),
        ({"storage": "gs://b"}, "storage: expected dir:PATH with --on slurm"),
        ({"storage": "dir:a b"}, "expected letters, digits and /._- alone"),
        ({"secret_env": {"A": "b/c"}}, "secret_env: expected none with --on slurm"),
    ],
)
def test_what_slurm_has_not_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        Launch.Config(
            **{"experiment": "demo_sft", "on": "slurm", "devices": "gpu:4", "storage": "dir:runs", **changes}
        ).check()


def test_an_option_is_one_option_of_a_line():
    cfg = Launch.Config(experiment="demo_sft", on="slurm", devices="gpu:4", storage="dir:runs")
    for value in ("a\n#SBATCH --uid=0", "a b", "$(id)"):
        cfg.slurm.partition = value
        with pytest.raises(UserError, match="partition: expected letters"):
            cfg.check()


def test_a_run_whose_jobs_are_there_is_refused(queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (queue / "100.json").write_text('{"state": "RUNNING", "options": {"job-name": "demo-sft-trainer"}}')
    assert cli.main(["launch", *SFT]) == 2
    assert "demo-sft is queued or running: squeue --me --name=demo-sft-trainer" in capsys.readouterr().err
    assert list(jobs(queue)) == ["100"]


@pytest.mark.slow
def test_jobs_are_looked_at_and_ended_by_the_run(queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "runs" / "mine"
    logs, scripts = run / "launch" / "logs", run / "launch" / "submission"
    logs.mkdir(parents=True)
    scripts.mkdir()
    bodies = {"head": "print('rl: step 3 of 9', flush=True); time.sleep(99)", "worker-0": "sys.exit('no GPU')"}

    def said(*words: str, status: int = 0) -> str:
        assert cli.main(["launch", *words]) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    for role, body in bodies.items():
        (scripts / f"mine-{role}.sbatch").write_text(
            f"#SBATCH --job-name=mine-{role}\n#SBATCH --output={logs}/mine-{role}-%j.out\n#SBATCH --nodes=1\n"
            f'srun --ntasks-per-node=1 python -c "import sys, time; {body}"\n'
        )
    assert "neither squeue nor sacct has a job named mine-head, mine-worker-0" in said("status", "mine", status=2)
    for role in bodies:
        subprocess.run(["sbatch", f"mine-{role}.sbatch"], cwd=scripts, check=True, capture_output=True)
    wait(lambda: jobs(queue)["101"]["state"] == "FAILED" and "step" in said("logs", "mine"), logs, 60)
    shown = said("status", "mine")
    assert "mine-head: running\n" in shown and "mine-worker-0: failed: mine-worker-0-101 ended with status 1" in shown
    assert "no GPU" in shown and "; rl: step 3 of 9\n" in shown
    assert said("logs", "mine", "--role", "head") == "==> mine-head-100 <==\nrl: step 3 of 9\n"
    assert "it, and launch it again with more --workers" in said("add-worker", "mine", status=2)
    assert "stopped: mine-head, mine-worker-0; the run directory stays" in said("stop", "mine")
    assert jobs(queue)["100"]["state"] == "CANCELLED"
    assert "mine-head: failed: " in said("status", "mine")
    assert "mine has no job that is queued or running; its results stay in" in said("stop", "mine", status=2)


@pytest.mark.full
def test_two_machines_train_as_one_save_when_asked_and_go_on_in_the_job_that_is_queued_again(
    queue: Path, tmp_path: Path
):
    steps = ("--set", "num_steps=30", "--set", "checkpoint.save_every=1000", "--storage", f"dir:{tmp_path}/runs")
    assert cli.main(["launch", *SFT, *steps]) == 0
    run = tmp_path / "runs" / "demo-sft"
    assert [(one.name, one.state) for one in find_run(str(run)).status()] == [("demo-sft-trainer", "running")]
    logs = run / "launch" / "logs"
    wait(lambda: any("train: step" in path.read_text() for path in logs.glob("*.out")), logs)
    notice(queue, "100")
    wait(lambda: jobs(queue)["100"]["state"] in ("COMPLETED", "FAILED"), logs)
    job, said = jobs(queue)["100"], (logs / "demo-sft-trainer-100.out").read_text()
    assert (job["state"], job["restarts"]) == ("COMPLETED", 1), said
    assert "stopped at step" in said and "ended with status 143, and is queued again" in said
    assert "done: step 30" in said and len(list(logs.glob("demo-sft-trainer-?.log"))) == 2, "both processes"
    assert cli.main(["launch", *SFT, *steps]) == 0, "the same again, after its end"
    wait(lambda: jobs(queue).get("101", {}).get("state") == "COMPLETED", logs)
    assert "finished before, at step 30" in (logs / "demo-sft-trainer-101.out").read_text()


@pytest.mark.full
def test_an_rl_run_is_a_job_for_each_role_and_they_find_the_head(queue: Path, tmp_path: Path):
    more = ("--set", "num_steps=2", "--set", "warm_start=None", "--set", "evaluation=None")
    devices = ("--gpu", "h100:1", "--workers", "1", "--worker-gpu", "h100:1")
    cpu = ("--set", "launch.env={'AXL_REHEARSED_GPU': 'H100', 'JAX_NUM_CPU_DEVICES': '1'}")
    storage = ("--storage", f"dir:{tmp_path}/runs")
    assert cli.main(["launch", "demo", "--on", "slurm", *devices, *more, *cpu, *storage]) == 0
    logs = tmp_path / "runs" / "demo" / "launch" / "logs"
    wait(lambda: {one["state"] for one in jobs(queue).values()} == {"COMPLETED"}, logs)
    assert [one["options"]["job-name"] for one in jobs(queue).values()] == [
        "demo-trainer",
        "demo-worker-0",
        "demo-head",
    ]
    assert (tmp_path / "runs" / "demo" / "launch" / "token").stat().st_mode & 0o077 == 0
    assert read_rows(tmp_path / "runs" / "demo" / "metrics.jsonl")[-1]["step"] == 2
