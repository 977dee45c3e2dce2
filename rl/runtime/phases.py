"""The phases of a run as the driver sees them: an event and a line for each, and progress on the terminal.

Which phase it is follows from the files of the run directory, whichever process works.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from axlearn_like.run.progress import Progress, one_line
from rl.controller.evaluations import is_evaluated
from rl.experiment import RLExperiment
from rl.training.warm_start import is_warm_start_due, warm_start_directory

_EARLY = ", or fewer if it learns faster"
_ANSWER_EVERY = 30.0  # seconds between answers that are shown, later a tenth of the time so far


class Phases:
    """The phases `sft`, `eval_before`, `rl` and `eval_after`, of which some may be done or not be asked for.

    The seconds of a phase add up over resumed sessions.
    """

    def __init__(
        self,
        cfg: RLExperiment.Config,
        run: RunDirectory,
        events: EventLog,
        say: Callable[[str], None],
        *,
        start: int,
        starting: str,
        progress: bool = True,
        announce: bool = True,
    ):
        """Find out where the run stands.

        Args:
            events: receives the begin and end of each phase.
            start: completed updates.
            starting: what the first line adds.
            announce: print a line for each phase.
        """
        self._announces = announce
        self._cfg, self._run, self._events, self._say = cfg, run, events, say
        self._start, self._starting, self._last = start, starting, max(start, cfg.num_steps)
        self._warming = is_warm_start_due(cfg.warm_start, run)
        inner = RunDirectory.attach(warm_start_directory(run))
        self._warm_events, self._warm_rows = JsonlTail(inner.events_path, from_end=True), JsonlTail(inner.metrics_path)
        self._rows = JsonlTail(run.metrics_path)
        self._samples, self._shown_at = JsonlTail(run.rollouts / "rl.jsonl", from_end=True), 0.0
        early = cfg.trainer.early_stopping
        self._rule = early and early.build()
        self._recent: deque[dict[str, Any]] = deque(maxlen=10 if early is None else max(10, early.rows + 1))  # metrics
        self._phase, self._began = "", 0.0
        self._progress: Progress | None = None
        self._shows = progress
        self._shown = -1  # step
        self._alarms = cfg.alarms.build()

    def update(self, step: int) -> None:
        """Look again; `step` is the number of completed updates."""
        if (phase := self._current(step)) != self._phase:
            self._end()
            self._begin(phase)
        if phase.startswith("eval_"):
            return
        progress = self._progress
        if phase == "sft" and progress is not None:
            for row in self._warm_rows.new_rows():
                progress.update(row["step"], loss=row.get("loss"))
        rows = [row for row in self._rows.new_rows() if row["phase"] == "rl"]
        self._recent += rows
        for row in rows:
            lines = list(self._alarms.observe(row))
            if row["step"] > self._start:  # earlier rows were shown by their own session
                for line in lines:
                    self._events.append("driver", "alarm", step=row["step"], text=line)
                    self._say(line)
        if progress is not None and phase == "rl" and step != self._shown and self._recent:
            self._shown = step
            rewards = [row["reward"] for row in self._recent if "reward" in row][-10:]
            note = f"reward {sum(rewards) / len(rewards):.3f}" if rewards else "no answer could be scored"
            progress.update(step, note=note)
            self._show_answer()
        if phase == "rl" and step < self._last and self._rule is not None and self._rule(self._recent, before=step):
            self._last = step
            self._say(f"early stopping: update {step} is the last, by trainer.early_stopping")

    def _show_answer(self) -> None:
        """Print the newest answer with its reward, now and then."""
        now = time.monotonic()
        if now >= self._shown_at and (rows := self._samples.new_rows()):
            self._shown_at = now + max(_ANSWER_EVERY, (now - self._began) / 10)
            row = rows[-1]
            self._say(
                f"answer of update {row['step']}, reward {row['reward']:.2f}: {one_line(row['answer'], 100)} "
                f"(to: {one_line(row['question'], 60)})"
            )

    def __enter__(self) -> "Phases":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _current(self, step: int) -> str:
        if self._warming:
            ended = [row["reason"] for row in self._warm_events.new_rows() if row["event"] == "train_end"]
            self._warming = "done" not in ended
        if self._warming:
            return "sft"
        if self._cfg.evaluation is not None and self._start == 0 and not is_evaluated(self._run, "before", 0):
            return "eval_before"
        return "rl" if step < self._last or self._cfg.evaluation is None else "eval_after"

    def _begin(self, phase: str) -> None:
        self._phase, self._began = phase, time.monotonic()
        self._events.append("driver", "phase_begin", phase=phase)
        if self._announces:
            self._say(self._line(phase) + self._starting)
        self._starting = ""
        if self._shows and phase == "sft" and self._cfg.warm_start is not None:
            self._progress = Progress(self._cfg.warm_start.num_steps)
        elif self._shows and phase == "rl":
            self._progress = Progress(self._cfg.num_steps, start=self._start, title="rl")
        if self._progress is not None:
            self._progress.__enter__()

    def _line(self, phase: str) -> str:
        cfg = self._cfg
        if phase == "sft" and cfg.warm_start is not None:
            early = cfg.warm_start.early_stopping
            return f"supervised fine-tuning: {cfg.warm_start.num_steps} steps{_EARLY if early else ''}"
        if phase == "rl":
            rollouts = cfg.prompts_per_step * cfg.samples_per_prompt
            updates = f"reinforcement learning: {cfg.num_steps} updates of {rollouts} rollouts"
            return updates + (_EARLY if self._rule else "")
        when = phase.removeprefix("eval_")
        problems = cfg.evaluation.problems_per_family if cfg.evaluation is not None else 0
        return f"evaluation {when} RL: {problems} held-out problems of each family x {cfg.samples_per_prompt}"

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None
        if self._phase:
            seconds: dict[str, Any] = {"seconds": round(time.monotonic() - self._began, 3)}
            self._events.append("driver", "phase", phase=self._phase, **seconds)
            self._phase = ""
