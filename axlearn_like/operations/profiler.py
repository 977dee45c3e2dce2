"""A window of steps recorded by the JAX profiler: planned in the config, or requested while the run goes on."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, override

import jax

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.run.events import EventLog

_LOOK_EVERY = 1.0  # seconds between looks for the file
_NOTHING = nullcontext()
_REQUEST = "profile.now"


class ProfileSignal:
    """Handler of SIGUSR1 in a process other than the trainer's main thread: it asks the trainer by the file.

    Without a handler the signal would end the process.
    """

    def __init__(self, run_dir: Path):
        self._path = run_dir / _REQUEST
        self._previous = _set_handler(self._on_signal)

    def close(self) -> None:
        """Restore the previous handler."""
        _restore_handler(self._previous)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._path.touch()
        print(f"SIGUSR1: the trainer is asked for a profile of its next updates ({self._path})", file=sys.stderr)


def _set_handler(handler: Callable[[int, FrameType | None], None]) -> Any:
    """Handle SIGUSR1; returns the previous handler, or None where there can be none (Windows, other threads)."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGUSR1"):
        return signal.signal(signal.SIGUSR1, handler)
    return None


def _restore_handler(previous: Any) -> None:
    if previous is not None:
        signal.signal(signal.SIGUSR1, previous)


class Profiler(Configurable):
    """Recorder of traces in `profiles/` of a run directory; open them with xprof or TensorBoard.

    On request: SIGUSR1 to the process, or a file `profile.now` in the run directory, which is removed.
    """

    class Config(ConfigBase["Profiler"]):
        start_step: int | None = None  # the first update to be recorded; None: only on request
        steps: int = 3  # updates in a window

        @override
        def check_fields(self) -> None:
            self.require_least(1, "start_step", "steps")

    def __init__(self, cfg: Config, *, run_dir: Path, events: EventLog):
        self.request_path = run_dir / _REQUEST
        self._folder, self._cfg, self._events = run_dir / "profiles", cfg, events
        self._signalled, self._look_at = False, 0.0
        self._trace: Path | None = None  # active trace
        self._first = 0
        self._previous: Any = None

    def __enter__(self) -> "Profiler":
        self._previous = _set_handler(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        _restore_handler(self._previous)
        self._stop(None)

    def window(self, step: int, pending: Any) -> AbstractContextManager[Any]:
        """Return the context of update number `step`; `pending` are results of the update before, or None."""
        if self._trace is None:
            if step != self._cfg.start_step and not self._requested():
                return _NOTHING
            self._start(step, pending)
        elif step >= self._first + self._cfg.steps:
            self._stop(pending)
            return _NOTHING
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def _requested(self) -> bool:
        if self._signalled:
            return True
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_EVERY
        return self.request_path.exists()

    def _start(self, step: int, pending: Any) -> None:
        jax.block_until_ready(pending)
        self._signalled = False
        self.request_path.unlink(missing_ok=True)
        path = self._folder / f"step-{step}"
        try:
            jax.profiler.start_trace(str(path))
        except RuntimeError as error:  # another trace is under way
            print(f"no profile of step {step}: {error}", file=sys.stderr, flush=True)
            return
        self._trace, self._first = path, step

    def _stop(self, pending: Any) -> None:
        if self._trace is None:
            return
        jax.block_until_ready(pending)
        path, self._trace = self._trace, None
        jax.profiler.stop_trace()
        self._events.append("trainer", "profile", step=self._first, path=str(path))
        print(f"profile: {path} (xprof --logdir {path})", file=sys.stderr, flush=True)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True
