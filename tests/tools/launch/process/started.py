"""A process of a launched run, started as its container starts it."""

import os
import subprocess
import sys
from pathlib import Path

MODULE = [sys.executable, "-m", "tools.launch.process"]


def start(run_dir: Path, mode: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a process of a run."""
    command = [*MODULE, mode, "--name", "run-trainer", "--run-dir", str(run_dir), *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables = {**own, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
