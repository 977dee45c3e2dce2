"""The phases of several policies that train side by side, and the progress of all of them on the terminal."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from axlearn_like.run.events import EventLog
from axlearn_like.run.jsonl import JsonlTail
from axlearn_like.run.progress import Progress
from rl.runtime.phases import Phases
from rl.runtime.policies.runs import PolicyRun
from rl.training.warm_start import latest_step

_NAMED = 3  # policies named in a line of progress


class PolicyPhases:
    """The phases of each policy, recorded in its own run directory; alarms and answers are shown with its name."""

    def __init__(
        self,
        parts: Sequence[PolicyRun],
        say: Callable[[str], None],
        *,
        starting: str,
        progress: bool,
        joined: Callable[[], Sequence[PolicyRun]] = list,
    ):
        """Find out where each policy stands; `starting` ends the first line; `joined`: those since its last call."""
        self._say, self._joined, self._stack = say, joined, ExitStack()
        self._rows: dict[str, JsonlTail] = {}
        self._steps: dict[str, int] = {}
        self._rewards: dict[str, float] = {}
        self._phases: dict[str, Phases] = {}
        for part in parts:
            self._add(part)
        updates = sum(part.experiment.cfg.num_steps for part in parts)
        count = f"{len(parts)} polic{'y' if len(parts) == 1 else 'ies'}"
        say(f"reinforcement learning of {count}: {updates} updates in all{starting}")
        start = sum(self._steps.values())
        self._progress = Progress(updates, start=start, title="rl") if progress else None

    def _add(self, part: PolicyRun) -> Phases:
        self._rows[part.name] = JsonlTail(part.run.metrics_path)
        self._steps[part.name] = latest_step(part.run.checkpoints / "rl") or 0
        self._phases[part.name] = Phases(
            *(part.experiment.cfg, part.run, EventLog(part.run.events_path), partial(self._say_of, part.name)),
            start=self._steps[part.name],
            starting="",
            progress=False,
            announce=False,
        )
        return self._phases[part.name]

    def update(self, _: int) -> None:
        """Look again at what the policies have written, and for those that have joined."""
        for part in self._joined():
            self._stack.enter_context(self._add(part))
            if self._progress is not None:
                self._progress.extend(part.experiment.cfg.num_steps)
        changed = False
        for name, tail in self._rows.items():
            for row in tail.new_rows():
                if row["phase"] == "rl" and row["step"] > self._steps[name]:
                    self._steps[name], changed = row["step"], True
                    self._rewards[name] = row.get("reward", self._rewards.get(name, 0.0))
            self._phases[name].update(self._steps[name])
        if changed and self._progress is not None:
            self._progress.update(sum(self._steps.values()), note=self._note())

    def _note(self) -> str:
        best = sorted(self._rewards.items(), key=lambda one: -one[1])
        shown = ", ".join(f"{name} {reward:.3f}" for name, reward in best[:_NAMED])
        return f"reward {shown}" + (f" and {len(best) - _NAMED} more" if len(best) > _NAMED else "")

    def _say_of(self, name: str, line: str) -> None:
        self._say(f"{name}: {line}")

    def __enter__(self) -> "PolicyPhases":
        if self._progress is not None:
            self._stack.enter_context(self._progress)
        for phases in self._phases.values():
            self._stack.enter_context(phases)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
