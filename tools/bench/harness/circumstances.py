"""Circumstances of a benchmark run: the machine, the date, the versions, the command."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("axlearn-like", "jax", "jaxlib", "numpy")


def machine() -> dict[str, Any]:
    """Describe the machine: usable cores, processor model, load over one minute."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": cores, "cpu": model, "load": round(os.getloadavg()[0], 2)}


def circumstances(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return the date, the versions of Python and of these packages, and the command."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "source tree"
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "command": " ".join(["axl", *sys.argv[1:]]),
    }
