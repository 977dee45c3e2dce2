"""Durations of a run on shared cores: those found from its events predict other configurations."""

from pathlib import Path
from typing import Any

import pytest

from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.lengths import read_lengths
from rl.runtime.simulated.simulation import SimulationPlan, simulate
from rl.runtime.simulated.sources.calibration import calibrated, period_of
from tests.rl.tiny import tiny_experiment


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "staleness"), [(2, 1), (1, 0)])
def test_durations_of_one_run_predict_another_configuration(tmp_path: Path, workers: int, staleness: int):
    lengths = read_lengths("fixed:5", 6)
    true = Durations(decode_step=0.1, update=0.7, update_rest=0.2, score=0.02, cores=2.0)
    known: dict[str, Any] = {"evaluation": None, "num_steps": 40}
    cfg = tiny_experiment(workers=workers, staleness=staleness, **known)
    simulate(SimulationPlan(cfg, true, lengths), tmp_path / "run")
    found = calibrated(tmp_path / "run", cfg, 2.0, lengths)
    assert found.decode_step == pytest.approx(0.1, rel=0.15)
    other = tiny_experiment(workers=3, staleness=2, **known)
    there = [
        simulate(SimulationPlan(other, one, lengths), tmp_path / name).trainer_log.rows
        for name, one in (("true", true), ("found", found))
    ]
    assert period_of(there[1], 12) == pytest.approx(period_of(there[0], 12), rel=0.15)
