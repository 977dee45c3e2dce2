"""A run that is followed: its new rows as they come, and the frame of them again and again."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from axlearn_like.run.jsonl import JsonlTail
from tools.report.load import Row, Run, number, parse_rows, policy_folders, read_part, read_report
from tools.watch.frame import frame, line
from tools.watch.standing import standing

_LOGS = ("warm_start/metrics.jsonl", "metrics.jsonl", "events.jsonl")
_SAMPLES = tuple(f"rollouts/{phase}.jsonl" for phase in ("eval_before", "rl", "eval_after"))
EVERY = 1.0  # seconds between frames
LINES = 5.0  # seconds between lines where there is no terminal
FETCHES = 10.0  # seconds between looks into a bucket, which gets the logs once a minute


class Follower:
    """Reader of a run directory that reads what is new; the directory may still be missing.

    `refresh` brings a copy up to date; it is called before a reading, now and then.
    """

    def __init__(self, folder: Path, refresh: Callable[[], object] = lambda: None):
        self._folder, self._refresh, self._due = folder, refresh, 0.0
        self._tails = {name: JsonlTail(folder / name) for name in (*_LOGS, *_SAMPLES)}
        self._rows: dict[str, list[Row]] = {name: [] for name in self._tails}
        self._notes: dict[str, list[str]] = {name: [] for name in self._tails}
        self._policies: dict[Path, Follower] = {}

    def read(self) -> Run:
        """Return what there is by now."""
        notes: list[str] = []
        if time.monotonic() >= self._due:
            self._refresh()
            self._due = time.monotonic() + FETCHES
        for name, tail in self._tails.items():
            if (self._folder / name).is_symlink():  # a run writes none
                notes.append(f"{name}: expected a file of the run, got a link; it is left out")
                continue
            try:
                lines = tail.new_lines()
            except OSError as error:
                notes.append(f"{name}: cannot be read: {error.strerror or error}")
                continue
            if tail.again:
                self._rows[name], self._notes[name] = [], []
            self._rows[name] += parse_rows(name, lines, self._notes[name])
        rows = self._rows
        for policy in policy_folders(self._folder):
            self._policies.setdefault(policy, Follower(policy))
        return Run(
            self._folder,
            config=read_part(self._folder / "config.txt", notes),
            metrics=[row for name in _LOGS[:2] for row in rows[name]],
            events=[row for row in rows[_LOGS[2]] if number(row.get("time")) is not None],
            rollouts=[row for name in _SAMPLES for row in rows[name]],
            report=read_report(self._folder / "report.json", notes),
            notes=notes + [note for found in self._notes.values() for note in found[:1]],
            policies=[follower.read() for _, follower in sorted(self._policies.items())],
        )


def watch(folder: Path, console: Console, refresh: Callable[[], object] = lambda: None) -> None:
    """Show a run until it ends: in place on a terminal, elsewhere by a line every few seconds, then the last frame.

    A run that is not there yet is awaited. Ctrl-C ends the watching, and nothing of the run.
    """
    follower = Follower(folder, refresh)
    try:
        if console.is_terminal:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                _follow(follower, lambda run: live.update(frame(run), refresh=True), EVERY)
        else:
            _follow(follower, lambda run: print(line(run), flush=True), LINES)
    except KeyboardInterrupt:
        pass
    console.print(frame(follower.read()))


def _follow(follower: Follower, show: Callable[[Run], object], every: float) -> None:
    while True:
        began = time.monotonic()
        show(run := follower.read())
        if standing(run).state not in ("running", "not started", "silent"):
            return
        time.sleep(max(every, 5 * (time.monotonic() - began)))  # a fifth of a processor at most
