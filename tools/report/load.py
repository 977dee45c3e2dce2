"""The contents of a run directory, which may still be written to or be incomplete.

A process that is killed leaves at most a torn last line in each ``.jsonl`` file, and one that
resumes appends after it; so a line that does not parse is skipped and counted, wherever it
stands, and the count is shown in the report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from axlearn_like.run.metrics import ROWS
from axlearn_like.run.object_store import fetched
from mesh.errors import UserError, did_you_mean, printable
from mesh.files.bounded import BoundsError, read_bounded
from rl.tasks.skipped import SkippedProblems, skipped_path, skipped_text

LARGEST = 1e100  # limit of drawn numbers; their squares and differences are finite
_LAST = 1e11  # unix time; the year 5138
_TEXTS = ("event", "role", "target", "who", "phase", "family")
PARTS = ("config.txt", "metrics.jsonl", "events.jsonl", "report.json")

Row = dict[str, Any]
Points = list[tuple[float, float]]


def number(value: object) -> float | None:
    """Return a float that can be drawn, or None for anything else (booleans, text, NaN, beyond 1e100)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def mapping(value: object) -> Row:
    """Return the value if it is a dict, else an empty dict: a part that is not there yet."""
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Outage:
    """A killed role: times in unix seconds; ``back`` is None while it has no replacement."""

    target: str
    killed: float
    back: float | None


@dataclass(frozen=True)
class Run:
    """The contents of a run directory at the time of reading. Every part may be empty."""

    path: Path
    config: str = ""
    metrics: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    rollouts: list[Row] = field(default_factory=list)
    report: Row = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    policies: list[Run] = field(default_factory=list)  # runs of its policies, where it trains several

    @property
    def name(self) -> str:
        """The run's name: the report's, else the directory's."""
        return printable(str(self.report.get("name") or self.path.resolve().name))

    @property
    def before(self) -> Row:
        """The evaluation before RL, empty if there is none yet."""
        return mapping(self.report.get("before"))

    @property
    def after(self) -> Row:
        """The evaluation after RL, empty if there is none yet."""
        return mapping(self.report.get("after"))

    @property
    def finished(self) -> bool:
        """Return whether both evaluations are there."""
        return bool(self.before) and bool(self.after)

    def rows(self, phase: str) -> list[Row]:
        """Return the metric rows of one phase by ascending step; for a step done twice the later row."""
        return self._by_phase.get(phase, [])

    @cached_property
    def _by_phase(self) -> dict[str, list[Row]]:
        found: dict[str, dict[float, Row]] = {}
        for row in self.metrics:
            if (step := number(row.get("step"))) is not None:
                found.setdefault(row.get("phase", ""), {})[step] = row
        return {phase: [rows[step] for step in sorted(rows)] for phase, rows in found.items()}

    def series(self, phase: str, key: str) -> Points:
        """Return the finite values of one metric as (step, value) pairs."""
        values = ((float(row["step"]), number(row.get(key))) for row in self.rows(phase))
        return [(step, value) for step, value in values if value is not None]

    @cached_property
    def families(self) -> list[str]:
        """Return the task families: those of the evaluations, then those found only in metrics or samples."""
        names: dict[str, None] = {}
        for evaluation in (self.before, self.after):
            names.update(dict.fromkeys(mapping(evaluation.get("families"))))
        for row in self.metrics:
            names.update(dict.fromkeys(key[7:] for key in row if key.startswith("reward/")))
        names.update(dict.fromkeys(str(row["family"]) for row in self.rollouts if row.get("family")))
        return list(names)

    @cached_property
    def start(self) -> float:
        """Return the unix time of the earliest row, counting spans from their beginning."""
        times = [float(row["time"]) - (number(row.get("seconds")) or 0.0) for row in self.events]
        times += [time for row in self.metrics if (time := number(row.get("time"))) is not None]
        return min(times, default=0.0)

    @cached_property
    def kills(self) -> list[Row]:
        """Return the report's kills or, without a report yet, those of the event log."""
        listed = self.report.get("kills")
        if isinstance(listed, list):
            return [mapping(kill) for kill in listed]
        return [
            {
                "target": outage.target,
                "time": outage.killed,
                "step": None if (step := self.step_at(outage.killed)) is None else int(step),
                "replaced_s": None if outage.back is None else outage.back - outage.killed,
            }
            for outage in self.outages
        ]

    @cached_property
    def outages(self) -> list[Outage]:
        """Return kills and deaths of the event log, each with the first start of its role after it.

        A kill that is also noticed as a death is one outage. The driver is back with its next session.
        """
        found: list[Outage] = []
        for row in self.events:
            if row.get("event") not in ("kill", "died"):
                continue
            target, killed = str(row.get("target", row.get("role"))), float(row["time"])
            if any(o.target == target and (o.back is None or o.back > killed) for o in found):
                continue
            backs = (float(later["time"]) for later in self.events if _returns(later, target))
            found.append(Outage(target, killed, min((back for back in backs if back > killed), default=None)))
        return found

    def step_at(self, time: float) -> float | None:
        """Return the RL step, with fraction, under way at a unix time; None outside the RL phase."""
        known = [(number(row.get("time")), float(row["step"])) for row in self.rows("rl")]
        ends = [(end, step) for end, step in known if end is not None]
        for (end, step), (next_end, next_step) in zip(ends, ends[1:], strict=False):
            if end <= time <= next_end:
                return step + (next_step - step) * (time - end) / max(next_end - end, 1e-9)
        return None


def _returns(row: Row, target: str) -> bool:
    """Return whether a row shows that a role is (again) running."""
    if row.get("event") == "session":
        return target == "driver"
    return row.get("event") in ("restart", "start") and target in (row.get("target"), row.get("role"))


def read_rows(path: Path, notes: list[str]) -> list[Row]:
    """Read a ``.jsonl`` file; a missing one is empty, unreadable lines are skipped and noted."""
    return parse_rows(path.name, read_part(path, notes).split("\n"), notes)


def parse_rows(name: str, lines: Iterable[str | bytes], notes: list[str]) -> list[Row]:
    """Parse the lines of a file of this name; unreadable ones are skipped and noted."""
    rows, bad, odd = [], 0, 0
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # RecursionError: nested deeper than the interpreter allows
            row = None
        if isinstance(row, dict):
            rows.append(cleaned(row))
            odd += rows[-1] != _each(row, _shown)  # an escaped control character is no value left out
        else:
            bad += 1
    if bad:
        notes.append(f"{name}: {bad} unreadable line{'s' * (bad > 1)} skipped")
    if odd:
        notes.append(f"{name}: values that are none left out of {odd} row{'s' * (odd > 1)}")
    return rows


def read_part(path: Path, notes: list[str]) -> str:
    """Return the text of a file of the run; a missing one is empty, one that is no regular file empty and noted."""
    if path.is_symlink():  # a run writes none; by one of a stranger the page would show a file of the reader
        notes.append(f"{path.name}: expected a file of the run, got a link; it is left out")
        return ""
    try:
        return printable(read_bounded(path, ROWS).decode("utf-8", errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except BoundsError as error:
        notes.append(f"{path.name}: {error}; it is left out")
        return ""


def cleaned(row: Row) -> Row:
    """Return a row without numbers that cannot be drawn, and without names and times that are none."""
    found: Row = _each(row, _drawable)
    for name in _TEXTS:
        if name in found and not isinstance(found[name], str):
            del found[name]
    time = number(found.get("time"))
    if "time" in found and (time is None or not 0 <= time <= _LAST):
        del found["time"]
    return found


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested data with printable names, and what stands in it changed."""
    if isinstance(value, dict):
        return {printable(name): _each(one, change) for name, one in value.items()}
    return [_each(one, change) for one in value] if isinstance(value, list) else change(value)


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _drawable(value: Any) -> Any:
    return None if isinstance(value, int | float) and abs(value) > LARGEST else _shown(value)


def failed_scores(events: list[Row]) -> str:
    """Return a sentence on the answers that the verifier could not score; empty if it could score all."""
    rows = [row for row in events if row.get("event") == "score" and number(row.get("failed"))]
    if not rows:
        return ""
    count = sum(int(number(row["failed"]) or 0) for row in rows)
    return f"{count} answers could not be scored; the last one: {rows[-1].get('error')}"


def read_report(path: Path, notes: list[str]) -> Row:
    """Read ``report.json``; a missing one is empty, a broken one empty and noted."""
    text = read_part(path, notes)
    if not text:
        return {}
    try:
        return mapping(_each(json.loads(text), _drawable))
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name}: not valid JSON ({error}); its numbers are left out")
        return {}


def _metrics(folder: Path, notes: list[str]) -> list[Row]:
    """Return the run's rows, after those of its warm start, which is a run of its own inside it."""
    warm = folder / "warm_start" / "metrics.jsonl"
    return read_rows(warm, notes) + read_rows(folder / "metrics.jsonl", notes)


def _skipped(folder: Path) -> list[str]:
    path = skipped_path(folder)
    return skipped_text(SkippedProblems(path).counts()) if path.is_file() else []


def left_out[T](part: str, make: Callable[[], T], instead: T, notes: list[str]) -> T:
    """Return a part of the report; of records from which it cannot be made, something else, and a note of that."""
    try:
        return make()
    except Exception as error:  # whatever stands in the records, the rest of the report is shown
        note = f"{part}: left out, since its records are odd ({type(error).__name__}: {error!s:.80})"
        if note not in notes:
            notes.append(printable(note))
        return instead


def is_run(path: Path) -> bool:
    """Return whether a directory holds at least one of a run's files."""
    return path.is_dir() and any((path / part).exists() for part in PARTS)


def policy_folders(run: Path) -> list[Path]:
    """Return the run directories of a run's policies; none: it trains one."""
    folder = run / "policies"
    return [] if folder.is_symlink() else [folder / name for name in _runs_in(folder)]


def _runs_in(folder: Path) -> Iterable[str]:
    try:
        return sorted(child.name for child in folder.iterdir() if is_run(child))
    except OSError:
        return []


def find_run(path: str | os.PathLike[str]) -> Path:
    """Return a run directory, of which nothing but names is looked at.

    Raises:
        UserError: The path does not exist or is not a run directory; the message says what was expected and where the
            nearest runs are.
    """
    folder = fetched(path, "RUN", version="none")
    expected = f"expected a run directory, one that holds {', '.join(PARTS[:-1])} or {PARTS[-1]}"
    if not folder.exists():
        hint = did_you_mean(folder.name, _runs_in(folder.resolve().parent))
        raise UserError(f"{folder}: no such directory; {expected}{hint}")
    if not is_run(folder):
        inside = list(_runs_in(folder)) if folder.is_dir() else []
        if inside:
            listed = ", ".join(str(folder / name) for name in inside[:8])
            hint = f"; it holds runs, name one of them: {listed}"
        else:
            beside = [name for name in _runs_in(folder.resolve().parent) if name != folder.name]
            hint = did_you_mean(folder.name, beside)
        raise UserError(f"{folder}: not a run directory; {expected}{hint}")
    return folder


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run directory (UserError: it is none, or cannot be read (see `find_run`))."""
    folder, notes = find_run(path), list[str]()
    try:
        config = read_part(folder / "config.txt", notes)
        events = read_rows(folder / "events.jsonl", notes)
        notes += left_out("skipped.jsonl", lambda: _skipped(folder), [], notes)
        notes += filter(None, [left_out("scores", lambda: failed_scores(events), "", notes)])
        if "allow_unisolated: True" in config:
            notes.append("answers may have run as code without isolation (allow_unisolated)")
        rollouts = [row for part in sorted((folder / "rollouts").glob("*.jsonl")) for row in read_rows(part, notes)]
        return Run(
            path=folder,
            config=config,
            metrics=_metrics(folder, notes),
            events=sorted(
                (row for row in events if number(row.get("time")) is not None),
                key=lambda row: row["time"],
            ),
            rollouts=rollouts,
            report=read_report(folder / "report.json", notes),
            notes=notes,
            policies=[load_run(policy) for policy in policy_folders(folder)],
        )
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where}: cannot read this part of the run: {error.strerror or error}") from error
