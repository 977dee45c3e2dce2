import os
import signal

import jax
import jax.numpy as jnp
import pytest

from axlearn_like.operations.profiler import Profiler
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError


def traces(run_dir):
    return sorted({path.relative_to(run_dir).parts[1] for path in run_dir.glob("profiles/*/plugins/**/*.xplane.pb")})


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
    with pytest.raises(UserError, match="start_step and steps >= 1, got None and 0"):
        Profiler.Config(steps=0).build(run_dir=tmp_path, events=None)
