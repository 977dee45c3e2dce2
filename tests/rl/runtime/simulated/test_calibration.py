"""Durations of a run on shared cores: those found from its events predict other configurations."""

import json
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


@pytest.mark.parametrize("apart", [True, False])
def test_cpu_seconds_tell_durations_whatever_else_computes(tmp_path: Path, apart: bool):
    """Events of a busy host: its waits are in `seconds`, what an undisturbed role would take is not.

    In one process, CPU seconds are those of all roles.
    """
    true = Durations(decode_step=0.01, decode_row=0.001, decode_cores=1.25, update=0.5, update_cores=1.6, call=0.02)
    lease, rest, controller, cpu = 0.04, 0.06, 0.001, {"trainer": 1.0, "worker-0": 1.0, "controller": 1.0}
    cfg = tiny_experiment(workers=1, evaluation=None)
    cfg.engine.set(max_num_seqs=64)
    each = cfg.samples_per_prompt
    roles = enumerate(cpu)
    rows: list[dict[str, Any]] = [
        {"time": 0.0, "role": role, "event": "start", "pid": number if apart else 7} for number, role in roles
    ]

    def event(role: str, name: str, spent: float, cores: float, after: float, **fields: Any) -> None:
        waits = 0.0 if len(rows) > 150 else 1.0  # the last ones are undisturbed
        cpu[role] += spent
        rows.append({"time": float(len(rows)), "role": role, "event": name, "seconds": spent / cores + waits})
        rows[-1] |= {"cpu_seconds": spent, "cpu": cpu[role], **fields}
        cpu[role] += after

    for step in range(60):
        for prompts in (2, 4):
            count = each * prompts
            seconds = 5 * (true.decode_step + true.decode_row * max(8, count)) * true.decode_cores
            between = 3 * true.call + lease * prompts * true.decode_cores
            about = {"rollouts": count, "tokens": 5 * count, "lease": len(rows)}
            event("worker-0", "generate", seconds, true.decode_cores, between, **about)
        event("trainer", "update", true.update * true.update_cores, true.update_cores, rest, step=step)
        cpu["controller"] += controller * each * 6
        rows.append({"time": float(len(rows)), "role": "controller", "event": "consumed", "cpu": cpu["controller"]})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        {"phase": "rl", "time": 2.0 * n, "completion_length": 5.0, "gen_tokens": 5.0 * each * 6} for n in range(60)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    found = calibrated(tmp_path, cfg, 2.0, read_lengths("fixed:5", 6))
    if not apart:
        assert (found.update_cores, found.decode_row, found.lease, found.rollout_rest) == (1.0, 0.0, 0.0, 0.0)
        return
    for name in ("decode_step", "decode_row", "decode_cores", "update", "update_cores", "call"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6), name
    assert (found.lease, found.update_rest) == (pytest.approx(lease), pytest.approx(rest))
    assert found.rollout_rest >= controller  # and what makes an update last the two seconds that it lasted
