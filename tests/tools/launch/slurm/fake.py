"""Commands of Slurm that run jobs on this machine, with an address of the loopback for each node.

`install` makes a folder for PATH with `sbatch`, `srun`, `scontrol`, `squeue`, `sacct` and `scancel`. Jobs are files of
a folder there: what sbatch reads of `#SBATCH`, the state, the pids of the tasks. A job that was requeued starts
again with the next SLURM_RESTART_COUNT. Nothing else of Slurm is there: no queue, no limits, no cgroups.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("sbatch", "srun", "scontrol", "squeue", "sacct", "scancel")


def install(folder: Path) -> Path:
    """Make the commands; returns the folder of the jobs."""
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} {name} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "jobs").mkdir()
    return folder / "jobs"


def jobs(folder: Path) -> dict[str, dict]:
    """Return the jobs by number."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def end(folder: Path) -> None:
    """Kill what the jobs of a test that has failed still run."""
    for one in jobs(folder).values():
        if one["state"] in ("RUNNING", "REQUEUED") and "pid" in one:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one["pid"], signal.SIGKILL)
            for pid in one["tasks"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


def notice(folder: Path, job: str) -> None:
    """Send the signal that --signal asks for to the tasks of a job."""
    for pid in jobs(folder)[job]["tasks"]:
        os.kill(pid, signal.SIGTERM)


def _change(folder: Path, job: str, **fields: object) -> dict:
    path = folder / f"{job}.json"
    found = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found))
    os.replace(new, path)
    return found


def _sbatch(folder: Path, script: str) -> None:
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    job = str(100 + len(jobs(folder)))
    path = folder / f"{job}.sh"
    path.write_text(text)  # as Slurm keeps it
    _change(folder, job, options=options, state="RUNNING", restarts=0, tasks=[])
    command = [sys.executable, __file__, str(folder.parent), "run", job]
    nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(command, start_new_session=True, **nowhere)
    print(f"Submitted batch job {job}")


def _run(folder: Path, job: str) -> None:
    options = _change(folder, job, pid=os.getpid())["options"]
    log = options["output"].replace("%j", job)
    while True:
        count = jobs(folder)[job]["restarts"]
        own = {"SLURM_JOB_ID": job, "SLURM_NNODES": options["nodes"], "SLURM_JOB_NODELIST": f"node{job}[0-9]"}
        own |= {"SLURM_RESTART_COUNT": str(count)} if count else {}
        with open(log, "ab") as file:
            done = subprocess.run(["bash", str(folder / f"{job}.sh")], stdout=file, stderr=file, env=os.environ | own)
        if (state := jobs(folder)[job]["state"]) != "REQUEUED":
            ended = "CANCELLED" if state == "COMPLETING" else "FAILED" if done.returncode else "COMPLETED"
            _change(folder, job, state=ended, status=done.returncode)
            return
        _change(folder, job, state="RUNNING", restarts=count + 1)


def _address(node: int) -> str:
    return f"127.77.{int(os.environ['SLURM_JOB_ID'])}.{node + 1}"


def _srun(folder: Path, *words: str) -> None:
    command = [word for word in words if not word.startswith("--") or words.index(word) > words.index("python")]
    tasks = []
    for node in range(int(os.environ["SLURM_NNODES"])):
        own = {"SLURM_PROCID": str(node), "POD_IP": _address(node), "RAY_TMPDIR": f"/tmp/axl-fake-{os.getpid()}-{node}"}
        tasks.append(subprocess.Popen(command, env=os.environ | own))
    _change(folder, os.environ["SLURM_JOB_ID"], tasks=[task.pid for task in tasks])
    while not all(task.poll() is not None for task in tasks):
        if any(task.poll() for task in tasks):
            time.sleep(20)  # they end by themselves when one is lost
            [task.kill() for task in tasks]
        time.sleep(0.1)
    sys.exit(max(task.wait() for task in tasks))


def main(folder: Path, name: str, *words: str) -> None:
    """Be one of the commands."""
    if name == "sbatch":
        _sbatch(folder, words[-1])
    elif name == "run":
        _run(folder, words[0])
    elif name == "srun":
        _srun(folder, *words)
    elif words[:2] == ("show", "hostnames"):
        print("\n".join(map(_address, range(int(os.environ["SLURM_NNODES"])))))
    elif words[:1] == ("requeue",):
        _change(folder, words[1], state="REQUEUED")
    elif words[:2] == ("show", "job"):
        state = jobs(folder)[words[2]]["state"]
        print(f"JobId={words[2]} JobState={state.replace('COMPLETING', 'CANCELLED')} Reason=None")
    elif name == "scancel":
        for job in words:
            _change(folder, job, state="COMPLETING")
            notice(folder, job)
    else:
        (wanted,) = [word.removeprefix("--name=").split(",") for word in words if word.startswith("--name=")]
        for job, one in jobs(folder).items():
            called, active = one["options"]["job-name"], one["state"] in ("RUNNING", "REQUEUED", "COMPLETING")
            if called in wanted and (active or name == "sacct"):
                state = "CANCELLED by 1000" if one["state"] == "CANCELLED" else one["state"]
                print(f"{job}|{called}|{state}|" + ("None" if name == "squeue" else f"{one.get('status', 0)}:0"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "jobs", *sys.argv[2:])
