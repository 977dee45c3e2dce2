"""Orphan cleanup: processes that a killed driver has left running on this machine."""

import contextlib
import os

import psutil

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.jsonl import JsonlTail
from rl.runtime.node.warm import NAME


def end_orphans(run: RunDirectory) -> None:
    """Kill actors of a killed command or dead Ray, which would write into the same run for seconds more."""
    orphans = find_orphans(run)
    for process in orphans:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(orphans, timeout=5.0)


def find_orphans(run: RunDirectory) -> list[psutil.Process]:
    """Return the actors of this run on this machine that have lost their driver or their Ray."""
    actors, groups = set(), set()
    for row in JsonlTail(run.events_path).new_rows():
        if row["event"] == "start" and "pid" in row:
            actors.add(row["pid"])
        elif row["event"] == "session":
            groups.add(row["group"])
    return [process for process in psutil.process_iter() if _is_orphan(process, actors, groups)]


def _is_orphan(process: psutil.Process, actors: set[int], groups: set[int]) -> bool:
    try:
        named = " ".join(process.cmdline()).startswith("ray::")
        mine = named and (process.pid in actors or os.getpgid(process.pid) in groups)
        parent = process.parent() if mine else None
        if not mine or parent is None:
            return mine
        if parent.name() not in ("raylet", NAME):
            return True
        while parent is not None and parent.name() == NAME:  # forked for a job by a fork
            parent = parent.parent()
        return parent is None or parent.pid == os.getpid()  # forked here, for a Ray that has died
    except (psutil.Error, ProcessLookupError):
        return False
