"""Policies that join, stop and resume while the others of their run go on: rows of a file in the run directory.

`axl rl add`, `stop` and `resume` append a row each to `policies.jsonl`, and no row changes later. So at any time the
file says what is wanted of each policy. Trainer and controller take that up between two updates, and say so in the
run's events: `policy_admitted` and `policy_stopped`, with the number of the row. A role that starts again reads both.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
from collections.abc import Collection, Generator
from pathlib import Path

from axlearn_like.config import reach
from axlearn_like.config.consent import note_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.experiment import RLExperiment

FOLDER = "policies"  # folder in the run directory of an experiment with several
_ADMITTED, _STOPPED = "policy_admitted", "policy_stopped"  # events
NAME = re.compile(r"[a-z0-9][a-z0-9._=+-]{0,99}")  # names of policies, which are names of folders too


@dataclasses.dataclass(frozen=True)
class Change:
    """The last change of a policy that the user has asked for, or that was taken up."""

    number: int  # number of its row among all changes of the run, from 1
    stopped: bool  # the policy is to stop; False: it joins or resumes


@dataclasses.dataclass(frozen=True)
class PolicyChanges:
    """All changes of a run."""

    joined: dict[str, dict[str, str]]  # edits of the policies that join, path -> text, in their order
    last: dict[str, Change]  # last change of each policy that has one


def changes_path(run: RunDirectory) -> Path:
    """Return the path of the file, which is there once a policy was added, stopped or resumed."""
    return run.path / "policies.jsonl"


def read_changes(run: RunDirectory) -> PolicyChanges:
    """Read what is wanted of the policies; rows of another form count for nothing (UserError: it cannot be read)."""
    joined, last = dict[str, dict[str, str]](), dict[str, Change]()
    for number, row in enumerate(read_rows(changes_path(run)), start=1):
        name, edits = row.get("policy"), row.get("edits")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            continue
        match row.get("event"):
            case "add" if isinstance(edits, dict) and all(isinstance(value, str) for value in edits.values()):
                joined.setdefault(name, edits)
                last[name] = Change(number, stopped=False)
            case "stop" | "resume":
                last[name] = Change(number, stopped=row["event"] == "stop")
            case _:
                pass
    return PolicyChanges(joined, last)


def with_joined(cfg: RLExperiment.Config, run: RunDirectory) -> RLExperiment.Config:
    """Return the config of a run with the policies that have joined it; what the file lets them reach needs consent."""
    joined = read_changes(run).joined if cfg.policies else {}
    if joined.keys() <= cfg.policies.keys():
        return cfg
    whole = cfg.clone(policies={**joined, **cfg.policies})
    note_text(reach(whole).keys() - reach(cfg).keys())
    return whole


def stopped_policies(run: RunDirectory) -> frozenset[str]:
    """Return the policies that were stopped and not resumed."""
    return frozenset(name for name, change in read_changes(run).last.items() if change.stopped)


class WantedChanges:
    """The last change of each policy of a run whose directory is open, read again when the file has grown."""

    def __init__(self, run: RunDirectory, begun: Collection[str]):
        """`begun`: policies with which the run began."""
        self._run, self._begun, self._tail = run, begun, JsonlTail(changes_path(run))
        self._known = PolicyChanges({}, {})

    def __call__(self) -> dict[str, Change]:
        """Return the changes; those before stay where the file cannot be read."""
        with contextlib.suppress(UserError, OSError):
            if self._tail.new_lines():
                self._known = read_changes(self._run)
        known = {*self._begun, *self._known.joined}
        return {
            name: change
            for name, change in self._known.last.items()
            if name in known and policy_run(self._run, name).config_path.is_file()
        }


def refuse_several(path: Path) -> None:
    """Refuse the run directory of several policies in the place of one (UserError names some of them)."""
    folders = sorted(found.parent.name for found in (path / FOLDER).glob("*/config.txt"))
    if folders:
        there = ", ".join(folders[:5]) + (", ..." if len(folders) > 5 else "")
        said = f"expected one of them, such as {path / FOLDER / folders[0]}"
        raise UserError(
            f"{path} is a run of {len(folders)} polic{'y' if len(folders) == 1 else 'ies'} ({there}); {said}"
        )


def policy_run(run: RunDirectory, name: str) -> RunDirectory:
    """Return the run directory of a policy, in that of the whole."""
    return RunDirectory.attach(run.path / FOLDER / name)


@contextlib.contextmanager
def changing(run: RunDirectory) -> Generator[EventLog]:
    """Hold the changes of a run for one process, and give the log that takes a new row."""
    descriptor = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield EventLog(changes_path(run))
    finally:
        os.close(descriptor)


# ---- what was taken up, by the events of the run


class TakenChanges:
    """The changes that trainer and controller have taken up, those of a former controller included."""

    def __init__(self, run: RunDirectory | None = None):
        """`run`: its events tell of them; None: nothing is recorded."""
        self._events, self._last = None, dict[str, Change]()
        if run is not None:
            self._events = EventLog(run.events_path)
            for row in read_rows(run.events_path, (_ADMITTED, _STOPPED)):
                self._last[row["policy"]] = Change(row["change"], stopped=row["event"] == _STOPPED)

    def is_new(self, policy: str, change: int) -> bool:
        """Return True if a change of a policy comes after those that were taken up."""
        return policy not in self._last or change > self._last[policy].number

    def is_stopped(self, policy: str) -> bool:
        """Return True if a policy was stopped, and not resumed."""
        return policy in self._last and self._last[policy].stopped

    def admitted(self, policy: str, change: int) -> None:
        """Record that a policy has joined or resumed."""
        self._record(policy, Change(change, stopped=False), _ADMITTED)

    def stopped(self, policy: str, change: int) -> None:
        """Record that a policy was stopped."""
        self._record(policy, Change(change, stopped=True), _STOPPED)

    def _record(self, policy: str, change: Change, event: str) -> None:
        self._last = {**self._last, policy: change}
        if self._events is not None:
            self._events.append("controller", event, policy=policy, change=change.number)


def failures(run: RunDirectory) -> dict[str, str]:
    """Return the policies that have failed since the run, or they, were last begun or resumed, and why."""
    found: dict[str, str] = {}
    for row in read_rows(run.events_path, ("session", "policy_failed", _ADMITTED)):
        if row["event"] == "session":
            found = {}
        elif row["event"] == "policy_failed":
            found[row["policy"]] = row["why"]
        elif row["event"] == _ADMITTED:
            found.pop(row["policy"], None)
    return found


def lease_numbers(run: RunDirectory) -> list[int]:
    """Return the numbers by which leases of a policy were told from those of others, in the order of its events."""
    starts = [row for row in read_rows(run.events_path, ["start"]) if row["role"] == "controller"]
    return [row["number"] for row in starts if "number" in row]
