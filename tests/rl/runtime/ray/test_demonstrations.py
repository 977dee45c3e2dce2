"""A worker that is killed while it draws beside demonstrations: the run is that of one process, to the bit."""

import signal
from pathlib import Path
from typing import Any

import pytest

from rl.objective.presets import luffy
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from tests.rl.runtime.ray.experiments import assert_same_outcome, metrics, run_here, slow
from tests.rl.runtime.ray.test_preemption import Scenario, run_with

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("shared_session")
def test_kill_9_beside_demonstrations(tmp_path: Path):
    objective = luffy(max_length=6).set(old_policy="current")
    fields: dict[str, Any] = {"objective": objective, "demonstrations": GroupDemonstrations.Config(), "workers": 1}
    expected = run_here(tmp_path / "here", slow(**fields))
    scenario = Scenario(tmp_path / "run")
    scenario.when(lambda: scenario.step >= 3, lambda: scenario.send("worker-0", signal.SIGKILL))
    run_with(scenario, **fields)
    assert scenario.starts("worker-0") == 2 and scenario.seen("lease_expired", worker="worker-0")
    assert_same_outcome(tmp_path / "run", expected)
    assert all(row["demonstrations"] > 0 for row in metrics(tmp_path / "run"))
