from pathlib import Path

from axlearn_like.run.events import EventLog
from tools.report import load_run, table
from tools.report.html import render
from tools.report.table import tables


def written(run: Path) -> Path:
    run.mkdir()
    (run / "config.txt").write_text("axlearn_like.training.trainer:Trainer\n")
    rows = [{"phase": "sft", "step": 1, "time": 5.0, "loss": 1.0, "tokens_per_second": 640.0, "mfu": 0.43}]
    (run / "metrics.jsonl").write_text("".join(f"{row}\n".replace("'", '"') for row in rows))
    events = EventLog(run / "events.jsonl")
    events.append("trainer", "train_begin", step=0, began=1.0)
    events.append("trainer", "goodput", since=0, step=4, seconds=8.0, causes={"step": 6.0, "compile": 2.0})
    return run


def test_a_supervised_run_shows_where_its_time_went(tmp_path: Path) -> None:
    run = load_run(written(tmp_path / "run"))
    assert "goodput 75.0% of 8.0 s in 1 process" in "\n".join(map(str, tables(run)))
    page = render(run)
    assert "Goodput 75.0%" in page and "compilation" in page
    assert "Supervised throughput" in page and "MFU" in page


def test_rows_that_say_nothing_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    events = EventLog(path / "events.jsonl")
    events.append("trainer", "train_begin", step="x", began=None)
    events.append("trainer", "goodput", since=4, step=5, seconds=1.0, causes="?")
    events.append("trainer", "goodput", since=4, step=5, seconds=1.0, causes={"step": None})
    assert table.goodput_text(load_run(path)).startswith("goodput 75.0% of 8.0 s")


def test_a_run_without_an_account_shows_none(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    EventLog(path / "events.jsonl").append("trainer", "start", pid=1)
    run = load_run(path)
    assert table.goodput_text(run) == table.goodput_card(run) == ""
