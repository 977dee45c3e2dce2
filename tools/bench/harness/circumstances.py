"""Circumstances of a benchmark run: the machine, the date, the versions, the command."""

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
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in packages}},
        "command": " ".join(["axl", *sys.argv[1:]]),
    }


def version_of(package: str) -> str:
    """Return the version of an installed package; a source tree has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "source tree"


def system_version() -> str:
    """Return the name and version of our own system."""
    return f"axlearn-like {version_of('axlearn-like')}"
