"""The study of learning: its runs' configs hold, its figures follow from files, and it goes on where it was killed."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mesh.errors import UserError
from rl.experiment import RLExperiment
from tests.studies.learning import study
from tests.studies.learning.figures import CONTRASTS, contrast, read_outcome, summarise
from tests.studies.learning.job import RUNS, SECTIONS, learning_job
from tests.studies.learning.plot import write_plots
from tests.studies.learning.study import find_runs, run_path

STEPS = 24


def test_every_run_is_in_a_section_and_every_contrast_is_of_runs():
    assert set(RUNS) == {name for names in SECTIONS.values() for name in names}
    assert {name for pair in CONTRASTS.values() for name in pair} <= set(RUNS)
    assert find_runs([]) == list(RUNS) and find_runs(["kl", "split"]) == [
        "grpo",
        "stale0",
        "kl",
        "microbatches",
        "packed",
    ]
    with pytest.raises(UserError, match="no run or section 'grop'; did you mean 'grpo'"):
        find_runs(["grop"])


@pytest.mark.parametrize("name", RUNS)
def test_the_config_of_every_run_holds(name: str, tmp_path: Path):
    cfg = learning_job(name, seed=1, steps=STEPS, folder=tmp_path)
    assert isinstance(cfg, RLExperiment.Config)
    cfg.check_fields()
    updates = 1 if cfg.trainer.updates is None else cfg.trainer.updates.count
    assert cfg.learner.schedule.total_steps == STEPS * updates  # pyright: ignore[reportAttributeAccessIssue]


def write_run(path: Path, rewards: list[float], **more: float) -> None:
    path.mkdir(parents=True, exist_ok=True)
    rows = [{"phase": "rl", "step": i + 1, "reward": r, "gen_tokens": 10.0, **more} for i, r in enumerate(rewards)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "report.json").write_text("{}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two seeds of three runs: `stale0` bends, `packed` is like it for 20 batches, `stale8` learns nothing."""
    for seed in range(2):
        bent = [0.3 + 0.4 * i / (i + 3) + 0.01 * ((i * 7 + seed) % 3) for i in range(STEPS)]
        write_run(run_path(tmp_path, "stale0", seed), bent)
        write_run(run_path(tmp_path, "packed", seed), [*bent[:20], *[x + 0.01 for x in bent[20:]]])
        write_run(run_path(tmp_path, "stale8", seed), [0.3 + 0.01 * ((i + seed) % 2) for i in range(STEPS)])
    return tmp_path


def test_with_dynamic_sampling_rewards_and_tokens_are_of_all_that_was_drawn(tmp_path: Path):
    write_run(tmp_path, [0.5, 0.5], reward_drawn=0.2, tokens_drawn=30.0)
    outcome = read_outcome(tmp_path, 2)
    assert outcome is not None and outcome.rewards == [0.2, 0.2] and outcome.tokens == [0.0, 30.0]


def test_figures_are_those_of_the_files(folder: Path):
    found: dict[str, dict[int, Any]] = {
        name: {seed: read_outcome(run_path(folder, name, seed), STEPS) for seed in range(2)}
        for name in ("stale0", "stale8", "packed")
    }
    assert read_outcome(run_path(folder, "stale0", 0), STEPS + 1) is None, "a run of more updates has not ended"
    assert read_outcome(run_path(folder, "grpo", 0), STEPS) is None
    one = found["stale0"][0]
    assert one.tokens == [10.0 * i for i in range(STEPS)] and one.last == pytest.approx(sum(one.rewards[-6:]) / 6)
    result = summarise(found)
    assert result["runs"]["stale8"]["reward_mean"] == pytest.approx(0.305)
    worse = result["contrasts"]["staleness 8"]
    assert worse["reward_last"] < -0.3 and worse["shown"] and worse["seeds"] == 2
    assert result["split"]["packed"] == {"equal_updates": 20, "reward_last_difference": 0.0067, "seeds": 2}
    same = contrast(found["stale0"], found["stale0"])
    assert same["reward_last"] == 0 and not same["shown"]
    files = write_plots(result, folder / "plots")
    assert [path.name for path in files] == ["learning_staleness.svg", "learning_split.svg"]
    assert "stale8" in files[0].read_text() and all(len(path.read_text()) < 30_000 for path in files)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_it_goes_on_where_it_was(tmp_path: Path):
    """Runs that have ended are read; the one that had not is made; all from one supervised start."""
    words = ["--quick", "--seeds", "1", "--steps", "2", "--folder", str(tmp_path)]
    first = CliRunner().invoke(study.main, [*words, "--only", "grpo"])
    result = json.loads(first.output.splitlines()[-1])
    assert not result["errors"] and set(result["runs"]) == {"grpo"}
    written = (run_path(tmp_path, "grpo", 0) / "metrics.jsonl").stat().st_mtime_ns
    both = CliRunner().invoke(study.main, [*words, "--only", "grpo,distillation,ppo"])
    result = json.loads(both.output.splitlines()[-1])
    assert set(result["runs"]) == {"ppo", "grpo", "distillation"} and not result["errors"]
    assert (run_path(tmp_path, "grpo", 0) / "metrics.jsonl").stat().st_mtime_ns == written
    part = CliRunner().invoke(study.main, [*words, "--only", "grpo,rloo", "--no-runs"])
    assert part.exit_code == 1 and json.loads(part.output.splitlines()[-1])["errors"] == {
        "rloo, seed 0": "has not ended"
    }
