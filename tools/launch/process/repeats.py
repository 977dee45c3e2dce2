"""A command that fails the same way as often as it is started: it ends, for to start it again would change nothing.

The record is beside the log, in the storage, so it counts the attempts of all machines on which a process was started.
"""

import contextlib
import json
import re
import signal
from pathlib import Path
from typing import Any

from axlearn_like.operations.watchdog import EXIT_CODE
from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError
from tools.launch.process.child import USER_ERROR, Child, StopSignals

TIMES = 3
AT_ONCE = 60.0  # seconds from the start of an attempt to its end
_LINES = 5
_READ = 1 << 14  # bytes
# An end that was no failure, or that is of the machine: killed, preempted, stuck.
_OTHER = (0, USER_ERROR, 128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGINT, EXIT_CODE)
_PROGRESS = re.compile(r"\bstep (\d+) of \d+\b")
# Messages of jax and its coordination service when another process of the program is lost.
_PEER_LOST = re.compile(r"coordination service|heartbeat|UNAVAILABLE|connection reset by peer", re.IGNORECASE)
_CHANGING = re.compile(r"\d{4}-\d\d-\d\d|\d\d?:\d\d:\d\d(?:[.,]\d+)?|\b[EWIF]\d{4}\b|0x[0-9a-fA-F]+|\bpid[ =:]*\d+")


def settled(status: int, child: Child, stop: StopSignals, run_dir: Path) -> int:
    """Return the status of a command that has ended; 2, after its reason, if it failed the same way `TIMES` times.

    It is the same way if the attempts ended within `AT_ONCE` of their starts, with one status, one last step and the
    same last lines, apart from times, addresses and pids. An attempt that came further than the last is the first, and
    one that has lost another process of its program is none.
    """
    record = child.log.with_suffix(".failed.json")
    if stop.requested or status in _OTHER or child.seconds > AT_ONCE:
        record.unlink(missing_ok=True)
        return status
    lines = _last_lines(child)
    if any(map(_PEER_LOST.search, lines)):
        return status
    how = {"status": status, "step": _last_step(lines, run_dir), "said": [_CHANGING.sub("", line) for line in lines]}
    before = _read(record)
    times = before.get("times", 0) + 1 if before.get("how") == how else 1
    if times < TIMES:
        record.write_text(json.dumps({"times": times, "how": how}) + "\n")
        return status
    record.unlink(missing_ok=True)
    said = " | ".join(line.strip() for line in lines[-2:])
    print(
        f"axl: failed {TIMES} times in the same way, with status {status}, and is not started again: {said}", flush=True
    )
    return USER_ERROR


def _last_lines(child: Child) -> list[str]:
    with child.log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(child.offset, size - _READ))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-_LINES:]


def _last_step(lines: list[str], run_dir: Path) -> int | None:
    """Return the step that the run has come to; None: it has not."""
    steps = [int(found[1]) for line in lines if (found := _PROGRESS.search(line))]
    with contextlib.suppress(UserError, OSError):
        steps += [row["step"] for row in read_rows(run_dir / "metrics.jsonl")[-1:] if type(row.get("step")) is int]
    return max(steps, default=None)


def _read(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and type(found.get("times")) is int else {}
