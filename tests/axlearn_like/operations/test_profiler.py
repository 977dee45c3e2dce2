import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from axlearn_like.operations.profiler import Profiler, ProfileSignal
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError


def traces(run_dir):
    return sorted({path.relative_to(run_dir).parts[1] for path in run_dir.glob("profiles/*/plugins/**/*.xplane.pb")})


@pytest.mark.slow
def test_a_window_by_plan_by_file_and_by_signal(tmp_path, capfd):
    events = EventLog(tmp_path / "events.jsonl")
    add = jax.jit(lambda x: x + 1)
    before = signal.getsignal(signal.SIGUSR1)
    with Profiler.Config(start_step=2, steps=2).build(run_dir=tmp_path, events=events) as profiler:
        x = pending = jnp.zeros(4)
        for step in range(1, 13):
            if step == 6:
                profiler.request_path.touch()
                profiler._look_at = 0.0  # the next look is due
            if step == 11:
                os.kill(os.getpid(), signal.SIGUSR1)
            with profiler.window(step, pending):
                x = pending = add(x)
        assert float(x[0]) == 12.0
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not profiler.request_path.exists()
    assert traces(tmp_path) == ["step-11", "step-2", "step-6"]  # the last one was cut short by the end
    rows = read_rows(tmp_path / "events.jsonl")
    assert [(row["event"], row["step"]) for row in rows] == [("profile", 2), ("profile", 6), ("profile", 11)]
    assert f"profile: {tmp_path / 'profiles' / 'step-6'}" in capfd.readouterr().err


def test_a_signal_to_another_process_or_thread_reaches_the_trainer(tmp_path, capfd):
    """The trainer of a role runs in a thread, where it can have no handler: the process has one that asks by file."""

    def train() -> None:
        with Profiler.Config(steps=1).build(run_dir=tmp_path, events=EventLog(tmp_path / "events.jsonl")) as profiler:
            for step in range(1, 4):
                profiler._look_at = 0.0  # the next look is due
                with profiler.window(step, None):
                    if step == 1:
                        asked.wait(60)
                assert step != 3 or not profiler.request_path.exists()

    before, asked = signal.getsignal(signal.SIGUSR1), threading.Event()
    with contextlib.closing(ProfileSignal(tmp_path)), ThreadPoolExecutor(1) as pool:
        trained = pool.submit(train)
        os.kill(os.getpid(), signal.SIGUSR1)
        asked.set()
        trained.result()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert len(traces(tmp_path)) == 1
    assert f"asked for a profile of its next updates ({tmp_path / 'profile.now'})" in capfd.readouterr().err


def test_a_trace_of_somebody_else_is_not_disturbed(tmp_path, capfd):
    events = EventLog(tmp_path / "events.jsonl")
    jax.profiler.start_trace(str(tmp_path / "theirs"))
    try:
        with Profiler.Config(start_step=1).build(run_dir=tmp_path, events=events) as profiler:
            with profiler.window(1, None):
                pass
    finally:
        jax.profiler.stop_trace()
    assert traces(tmp_path) == [] and list(tmp_path.glob("theirs/**/*.xplane.pb"))
    assert "no profile of step 1" in capfd.readouterr().err


def test_a_window_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="Profiler.steps: expected 1 or more, got 0"):
        Profiler.Config(steps=0).build(run_dir=tmp_path, events=None)
