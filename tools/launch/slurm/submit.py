"""Submission to Slurm from a machine that has its commands."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from mesh import UserError
from tools.launch.bundle import Bundle
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan
from tools.launch.submission import SUBMIT, write


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
