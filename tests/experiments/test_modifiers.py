"""Modifiers of RL alone, the recipe of ScaleRL and LUFFY: what they set, what they refuse, and that they run."""

from pathlib import Path

import pytest

from axlearn_like.config import ConfigError
from axlearn_like.run.metrics import read_rows
from experiments.demo.config import demo, demo_sft
from experiments.modifiers import luffy, scale_rl
from rl.objective.presets import scale_rl as loss
from rl.runtime.inprocess import run_inprocess
from tests.rl.tiny import tiny_experiment, tiny_run
from tests.test_modularity import LINES, code_lines


@pytest.mark.slow
def test_scale_rl_fits_experiments_of_rl_and_no_others():
    assert code_lines(scale_rl) <= LINES
    for cfg in (demo(), tiny_experiment()):
        scale_rl(cfg)
        assert cfg.objective == loss() and (cfg.staleness, cfg.parameter_server.keep) == (8, 10)
        pool = cfg.controller.pool
        assert cfg.controller.weights == "in_flight" and pool is not None and (pool.explore, pool.retire_at) == (1, 0.9)
        cfg.check("inprocess")
    with pytest.raises(ConfigError, match="has no Objective.Config"):
        scale_rl(demo_sft())


def test_luffy_fits_experiments_of_rl_and_keeps_their_correction():
    assert code_lines(luffy) <= LINES
    for cfg in (demo(), tiny_experiment()):
        before = cfg.objective.clone()
        luffy(cfg)
        assert cfg.objective.build().mixes and cfg.objective.importance == before.importance
        cfg.check("inprocess")
    with pytest.raises(ConfigError, match="has no Objective.Config"):
        luffy(demo_sft())


@pytest.mark.full
def test_scale_rl_runs(tmp_path: Path):
    cfg = tiny_experiment(evaluation=None, num_steps=3)
    scale_rl(cfg)
    run = tiny_run(tmp_path / "r", cfg)
    run_inprocess(cfg.build(), run, lambda: False, lambda step: None)
    rows = [row for row in read_rows(run.metrics_path) if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [1, 2, 3] and any(row["updates"] for row in rows)
    assert all(row["pool/again_fraction"] == 0 and row["staleness_max"] <= 8 for row in rows)
