"""Jobs of a run as status, logs and stop see a cluster: by squeue and sacct, the log files, and scancel.

A job that is no longer queued is known to sacct where the cluster keeps accounts; else its log is all that is left.
"""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from mesh import UserError
from tools.launch.bundle import Bundle
from tools.launch.control.api import ROLE, LaunchedApi, Object
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan
from tools.launch.submission import SUBMIT, write

_SINCE = "--starttime=now-30days"
_ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD")
_ENDS = 300.0  # seconds that jobs have to save, before the command returns all the same


class SlurmJobs(LaunchedApi):
    """Jobs whose scripts are in a run directory."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._names = sorted(path.stem for path in (run_dir / "launch" / "submission").glob("*.sbatch"))

    def active(self) -> dict[str, str]:
        """Return the numbers of the jobs that are queued or running, with their names."""
        return {number: name for name, (number, state, _) in self._jobs().items() if state in _ACTIVE}

    def delete(self, *names: str) -> None:
        """Cancel jobs; returns when they have ended (UserError: Slurm refuses, or they still save)."""
        numbers = [number for number, name in self.active().items() if name in names]
        if numbers:
            _ask("scancel", *numbers)
        deadline = time.monotonic() + _ENDS
        while left := sorted(self.active().keys() & set(numbers)):
            if time.monotonic() > deadline:
                raise UserError(f"{', '.join(left)} were cancelled, and have not ended after {_ENDS:.0f} s")
            time.sleep(1.0)

    def jobsets(self, run: str) -> list[Object]:
        """Return the newest job of each script in the form of a JobSet (UserError: Slurm knows none)."""
        found = []
        for name, (number, state, why) in self._jobs().items():
            status: Object = {}
            if state == "COMPLETED":
                status = {"terminalState": "Completed"}
            elif state not in _ACTIVE:
                failed = {"type": "Failed", "reason": f"job {number}: {state}", "message": ""}
                status = {"terminalState": "Failed", "conditions": [failed]}
            elif state != "RUNNING":
                waits = {"type": "Waiting", "status": "True", "message": f"job {number}: {state}, {why}"}
                status = {"conditions": [waits]}
            labels = {ROLE: name.removeprefix(f"{run}-")}
            found.append({"metadata": {"name": name, "labels": labels}, "status": status})
        if not found:
            raise UserError(
                f"{run}: neither squeue nor sacct has a job named {', '.join(self._names)}; its logs, if it ran, are "
                f"in {self.run_dir / 'launch' / 'logs'}"
            )
        return found

    def pods(self, run: str) -> list[Object]:
        """Return the newest jobs that have a log, each as a Pod of the log's name."""
        found = []
        for name, (number, state, code) in self._jobs().items():
            labels = {ROLE: name.removeprefix(f"{run}-"), "jobset.sigs.k8s.io/jobset-name": name}
            status: Object = {"phase": "Running" if state in ("RUNNING", "COMPLETING") else "Pending"}
            if state not in _ACTIVE and code.partition(":")[0].isdecimal():
                status = {"containerStatuses": [{"state": {"terminated": {"exitCode": int(code.partition(":")[0])}}}]}
            if (self._log(f"{name}-{number}")).is_file():
                found.append({"metadata": {"name": f"{name}-{number}", "labels": labels}, "status": status})
        return found

    def log(self, pod: str, lines: int) -> str:
        """Return the last lines of a job's output."""
        return "\n".join(self._log(pod).read_text(errors="replace").splitlines()[-lines:])

    def _log(self, pod: str) -> Path:
        return self.run_dir / "launch" / "logs" / f"{pod}.out"

    def _jobs(self) -> dict[str, tuple[str, str, str]]:
        """Return name -> number, state, and why it waits or its exit status, of the newest job of each script."""
        names = f"--name={','.join(self._names)}"
        queued = _ask("squeue", "--me", "--noheader", names, "--format=%i|%j|%T|%r")
        known = ""
        if shutil.which("sacct") is not None:
            fields = "--format=JobID,JobName,State,ExitCode"
            known = _ask("sacct", "--allocations", "--noheader", "--parsable2", _SINCE, names, fields)
        rows = [line.strip().split("|", 3) for text in (known, queued) for line in text.splitlines() if line.strip()]
        # "CANCELLED by 1000" is a state of sacct.
        found = [
            (int(row[0]), row[1], (row[0], row[2].partition(" ")[0], row[3])) for row in rows if row[0].isdecimal()
        ]
        return {name: job for _, name, job in sorted(found, key=lambda one: one[0]) if name in self._names}


def _ask(*command: str) -> str:
    """Return what a command of Slurm prints (UserError: it is not here, or refuses)."""
    if shutil.which(command[0]) is None:
        raise UserError(f"the run was submitted to Slurm, and there is no {command[0]} here; ask where there is")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def submit(
    cfg: Launch.Config, plan: LaunchPlan, files: dict[str, str], bundle: Bundle | None, say: Callable[[str], None]
) -> None:
    """Write the scripts into the run directory and submit them.

    Raises:
        UserError: there is no Slurm here, it refuses a job, or the run is active.
    """
    for name in ("sbatch", "squeue"):
        if shutil.which(name) is None:
            raise UserError(
                f"--on slurm: there is no {name} here; submit where Slurm's commands are, or write the scripts with "
                f"--dry-run DIR and run `bash {SUBMIT}` there"
            )
    folder = Path(cfg.place().path) / plan.name / "launch" / "submission"
    write(folder, files, bundle)
    done = subprocess.run(["bash", SUBMIT], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"--on slurm: not submitted: {(done.stderr or done.stdout).strip()}")
    say(f"{done.stdout.strip()}; logs and results in {folder.parents[1]}")
