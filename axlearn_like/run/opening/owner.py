"""The process that owns a run: how its lock names it, and if it lives."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.files.bounded import parse_json


@dataclass(frozen=True)
class Holder:
    """The process that has opened a run directory. `alive`: None where its machine cannot be asked."""

    pid: int
    host: str
    alive: bool | None


def this_process() -> dict[str, Any]:
    """Return what tells this process from all others, as JSON."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": _start_time(pid), "boot": _boot()}


def _boot() -> str:
    """Return an id of this start of the machine; "" where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_alive_here(owner: Mapping[str, Any]) -> bool | None:
    """Return True if a process of this machine is alive; None if it is of another machine."""
    here = (owner.get("host"), owner.get("boot")) == (socket.gethostname(), _boot())
    return is_alive(owner) if here else None


def _start_time(pid: int) -> str | None:
    """Return when the process began, which distinguishes it from a later process of the same number.

    A restarted container nearly always gets the same process number again. None where there is no
    /proc; "ended" for a process that has ended and only waits for its parent to notice.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "ended" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def parse_owner(text: str | bytes) -> dict[str, Any] | None:
    """Return `this_process` of a lock's text; None: it holds none."""
    try:
        owner = parse_json(text.encode() if isinstance(text, str) else text)
    except ValueError:  # writer died in the middle
        return None
    whole = isinstance(owner, dict) and {"pid", "host", "started"} <= set(owner)
    return owner if whole and type(owner["pid"]) is int and 0 < owner["pid"] < 1 << 31 else None


def is_alive(owner: Mapping[str, Any]) -> bool:
    """Return False if a process is known to have ended; one of another host cannot be seen from here."""
    if owner["host"] != socket.gethostname():
        return True
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return owner["started"] is None or owner["started"] == _start_time(owner["pid"])
