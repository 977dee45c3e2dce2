"""Runs of several policies: listed, watched and reported together, each an ordinary run besides."""

import shutil
from pathlib import Path

import pytest

from axlearn_like.run.events import EventLog
from tests.tools.report.made_up_run import HOSTILE, write_run
from tests.tools.watch.test_watch import held, shown
from tools.cli import main
from tools.report import load_run, write_report
from tools.report.table import policy_sheet, tables
from tools.watch.frame import line
from tools.watch.live import Follower


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A run whose policies are at different updates, and one of them has failed."""
    run = tmp_path / "sweep"
    for name, steps in (("lr=1e-3", 40), ("lr=1e-4", 20), ("lr=9", 3)):
        path = write_run(run / "policies" / name, steps=steps, kill=False, finished=name == "lr=1e-3")
        EventLog(path / "events.jsonl").append("controller", "evaluated", version=0, **{"pass@1": 0.25})
        EventLog(path / "events.jsonl").append("controller", "evaluated", version=steps, **{"pass@1": 0.5})
    (run / "config.txt").write_text("rl.experiment:RLExperiment\nnum_steps: 40\nprompts_per_step: 4\n")
    log = EventLog(run / "events.jsonl")
    log.append("driver", "session")
    log.append("controller", "policy_failed", policy="lr=1e-3", why="before it was resumed")
    log.append("controller", "policy_stopped", policy="lr=1e-4", change=1)
    log.append("driver", "session")
    log.append("controller", "policy_failed", policy="lr=1e-3", why="before it alone was resumed")
    log.append("controller", "policy_admitted", policy="lr=1e-3", change=2)
    log.append("controller", "policy_failed", policy="lr=9", why=f"NaN {HOSTILE}")
    return run


def test_one_table_has_all_policies_and_names_those_that_failed(several: Path):
    loaded = load_run(several)
    rows = policy_sheet(loaded).rows
    assert [row[0] for row in rows] == ["lr=1e-3", "lr=1e-4", "lr=9"]
    assert [row[1] for row in rows] == ["40", "20, stopped", f"3, failed: NaN {HOSTILE}"]
    for row, policy in zip(rows, loaded.policies, strict=True):
        reward = [value for _, value in policy.series("rl", "reward")]
        assert float(row[2]) == pytest.approx(reward[0], abs=0.01)
        assert float(row[3]) == pytest.approx(sum(reward[-20:]) / len(reward[-20:]), abs=0.01)
        assert row[4] == "25.0 % → 50.0 %"
        assert row[5] == f"{sum(value for _, value in policy.series('rl', 'gen_tokens')):,.0f}"
    assert "policies" not in "".join(map(str, tables(loaded.policies[0])))


def test_a_run_of_one_policy_is_not_said_to_have_policies(several: Path):
    held(several)
    for name in ("lr=1e-3", "lr=9"):
        shutil.rmtree(several / "policies" / name)
    assert policy_sheet(load_run(several)).title.startswith("1 policy, each a run in ")
    first, second = line(load_run(several)).splitlines()
    assert first == "sweep: running, 1 policy" and second.startswith("  lr=1e-4: ")


def test_the_report_of_the_whole_has_one_table_and_one_plot_of_all(several: Path):
    page = write_report(several).read_text()
    assert page.count("<h3>Reward of each policy") == 1 and "policies/NAME/report.html" in page
    for name in ("lr=1e-3", "lr=1e-4", "lr=9"):
        assert page.count(name) >= 2  # a row of the table, and a curve
    assert "<script" not in page and "left out" not in page
    assert "Reward of each policy" not in write_report(several / "policies" / "lr=1e-3").read_text()


def test_a_watch_shows_a_line_for_each_policy_and_those_that_come(several: Path):
    held(several)
    follower = Follower(several)
    text = shown(follower.read(), width=160)
    assert "sweep  running" in text and all(name in text for name in ("lr=1e-3", "lr=1e-4", "lr=9"))
    said = line(follower.read()).splitlines()
    assert len(said) == 4 and said[0] == "sweep: running, 3 policies" and "rl step 19" in said[2]
    write_run(several / "policies" / "new", steps=5, kill=False, finished=False)
    assert "new" in shown(follower.read(), width=160)


def test_a_policy_that_was_stopped_is_shown_so_though_the_run_goes_on(several: Path):
    held(several)
    path = several / "policies" / "lr=1e-4"
    held(path)
    assert line(load_run(path)).startswith("lr=1e-4: running")
    EventLog(path / "events.jsonl").append("trainer", "train_begin")
    EventLog(path / "events.jsonl").append("trainer", "train_end", step=20, reason="stop requested")
    assert line(load_run(path)).startswith("lr=1e-4: stopped")
    EventLog(path / "events.jsonl").append("trainer", "train_begin")
    assert line(load_run(path)).startswith("lr=1e-4: running")


def test_runs_lists_the_whole_and_its_policies(several: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", str(several.parent)]) == 0
    out = capsys.readouterr().out
    assert f"{several} " in out and all(f"{several}/policies/{name}" in out for name in ("lr=1e-3", "lr=1e-4", "lr=9"))
    assert main(["report", str(several)]) == 0
    out = "".join(capsys.readouterr().out.split())  # a long path is wrapped
    assert f"3policies,eacharunin{several}/policies" in out and "noevaluation" not in out
    both = [str(several / "policies" / name) for name in ("lr=1e-3", "lr=1e-4")]
    assert main(["compare", *both]) == 0


def test_a_link_in_the_place_of_policies_is_not_followed(several: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.txt").write_text("x\n")
    (other / "policies").symlink_to(several / "policies")
    assert load_run(other).policies == [] and Follower(other).read().policies == []
