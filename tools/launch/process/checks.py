"""Versions and clock of a machine on which a process of a run starts: what differs is a line, and no reason to end.

The times of events of all machines are compared, and libraries of other versions compile other programs.
"""

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ray", "libtpu")
_MOST = 2.0  # seconds that clocks may differ; the answer's date has no fractions
_TIMEOUT = 2.0


def version_lines(constraints: Path) -> Iterator[str]:
    """Yield a line for each library that is not of the version in a file of pinned versions."""
    if not constraints.is_file():
        return
    pins = dict(line.split("==") for line in constraints.read_text().split() if line.count("==") == 1)
    for name in _LIBRARIES:
        expected = pins.get(name)
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if expected is not None and found != expected:
            yield f"{name} {found} is installed here; the code was tested with {expected}"


def clock_lines(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line if this machine's clock differs from that of Google's metadata server; nothing if there is none."""
    host = environment.get("GCE_METADATA_HOST", "metadata.google.internal")
    asked = urllib.request.Request(f"http://{host}/computeMetadata/v1/", headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(asked, timeout=_TIMEOUT) as answer:
            theirs = parsedate_to_datetime(answer.headers["Date"]).timestamp() + 0.5
    except (urllib.error.URLError, OSError, ValueError, TypeError):
        return
    if abs(behind := theirs - time.time()) > _MOST:
        yield f"this machine's clock is {abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'} the platform's"
