"""How a run stands, from the files of its directory: running, finished, stopped or died, and at which step."""

import re
import time
from dataclasses import dataclass
from typing import Literal

from axlearn_like.run.directory import RunDirectory
from tools.report.load import Row, Run, number
from tools.report.words import duration

State = Literal["running", "finished", "stopped", "died", "silent", "not started", "unreadable"]
_SILENT = 900.0  # seconds; a trainer logs every ten, but may compile for minutes
_RL = re.compile(r"^prompts_per_step: ", re.MULTILINE)  # only RL experiments have it at the root
_TOTAL = {
    True: re.compile(r"^num_steps: (\d{1,18})$", re.MULTILINE),
    False: re.compile(r"^warm_start\.num_steps: (\d{1,18})$", re.MULTILINE),
}


@dataclass(frozen=True)
class Standing:
    """The state of a run."""

    # The lock of the directory says whether a process is alive, not the age of files. Of another machine's process only
    # its silence can be seen.
    state: State
    why: str  # the process, or what ended the run
    phase: str  # phase under way, or the last one
    step: int | None  # completed updates of that phase; None: it has none
    total: int | None  # updates that it has by the config; None: unknown
    row: Row  # last row of metrics
    seen: float | None  # unix time of the last row of any log; None: there is none

    @property
    def words(self) -> str:
        """State in words, such as `died at step 12`."""
        if self.state != "died":
            return self.state
        return f"died at step {self.step}" if self.step is not None else f"died in {self.phase or 'its start'}"

    @property
    def progress(self) -> str:
        """Steps in words, such as `12 of 240`; empty without any."""
        if self.step is None:
            return ""
        return str(self.step) if self.total is None else f"{self.step} of {self.total}"

    def age(self, now: float) -> float | None:
        """Return the seconds since the last sign of life; None: there was none."""
        return None if self.seen is None else max(0.0, now - self.seen)


def standing(run: Run, now: float | None = None) -> Standing:
    """Find out how a run stands; of its rows the last ones are enough."""
    row = next((row for row in reversed(run.metrics) if number(row.get("step")) is not None), {})
    times = [t for rows in (run.metrics, run.events) for r in rows[-1:] if (t := number(r.get("time"))) is not None]
    seen, logged = max(times, default=None), row.get("phase", "")
    begun = next((event for event in reversed(run.events) if event.get("event") in ("phase_begin", "phase")), {})
    phase = begun.get("phase", logged) if begun.get("event") == "phase_begin" else logged
    rl = bool(_RL.search(run.config))
    total = _TOTAL[phase == "rl" or not rl].search(run.config) if phase in ("rl", logged) else None
    state, why = _state(run, rl, seen, time.time() if now is None else now)
    step = number(row.get("step")) if phase == logged else 0.0 if phase == "rl" else None
    steps = None if step is None else int(step), None if total is None else int(total[1])
    return Standing(state, why, phase, *steps, row, seen)


def _state(run: Run, rl: bool, seen: float | None, now: float) -> tuple[State, str]:
    holder = RunDirectory(run.path).holder()
    ends = [row for row in run.events if row.get("event") in ("train_begin", "train_end")]
    reason = str(ends[-1].get("reason")) if ends and ends[-1]["event"] == "train_end" else ""
    if holder is not None and holder.alive is not False:
        if reason == "stop requested" and run.path.parent.name == "policies":  # others of its run go on
            return "stopped", f"by {reason}"
        who = f"process {holder.pid}" + ("" if holder.alive else f" on {holder.host}")
        silence = 0.0 if seen is None else now - seen
        if holder.alive is None and silence > _SILENT:
            return "silent", f"{who} cannot be asked, and has logged nothing for {duration(silence)}"
        return "running", who
    if run.report if rl else reason == "done":
        return "finished", ""
    if holder is not None:
        return "died", f"process {holder.pid} is gone without a word; the same command resumes"
    if not run.metrics and not run.events:
        return "not started", ""
    return "stopped", f"by {reason}" if reason not in ("", "done") else "before its end"
