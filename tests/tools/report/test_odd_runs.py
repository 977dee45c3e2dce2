"""The report of runs that are unfinished, damaged or hostile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh.errors import UserError
from tests.tools.report.made_up_run import HOSTILE, Page, section, table_text, write_run
from tools.cli import main
from tools.report import load_run, write_report
from tools.report.html import render


def test_hostile_text_stays_text(source: str, page: Page) -> None:
    assert "<script" not in source and "<img" not in source
    assert HOSTILE in "".join(page.words)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=20)
    for part in ("metrics.jsonl", "events.jsonl", "report.json"):
        text = (path / part).read_text()
        (path / part).write_text(text.replace("spell_backward", "<b id=x>").replace("worker-1", "<i>&'"))
    page = Page(render(load_run(path)))
    assert page.open == [] and "<b id=x>" in page.text
    assert not any(tag == "b" and attributes.get("id") == "x" for tag, attributes in page.tags)
    assert "<i>&' killed" in page.text


def test_a_run_under_way_is_reported(tmp_path: Path) -> None:
    path = write_run(tmp_path / "young", steps=40, finished=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 40, "rew')
    source = write_report(path).read_text()
    page = Page(source)
    assert page.open == [] and "RL step 39" in page.text
    assert "Empty: nothing logged for this yet." in section(source, "tasks")
    assert "<svg" in section(source, "reward")
    assert "metrics.jsonl: 1 unreadable line skipped" in page.text
    assert "SFT step 199, RL step 39" in " ".join(table_text(path).split())


@pytest.mark.parametrize("part", ["config.txt", "metrics.jsonl", "events.jsonl", "report.json"])
def test_any_single_part_is_enough(tmp_path: Path, part: str) -> None:
    whole = write_run(tmp_path / "whole", steps=20)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / part).write_bytes((whole / part).read_bytes())
    assert Page(write_report(alone).read_text()).open == []
    assert table_text(alone)


def test_broken_and_odd_values_do_not_stop_the_report(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.mkdir()
    (path / "report.json").write_text('{"before": {"pass@1": ')
    rows = [
        {
            "phase": "rl",
            "step": 0,
            "time": 5.0,
            "reward": 0.5,
            "logprob_diff_mean": 0.0,
            "entropy": float("nan"),
        },
        {"phase": "rl", "step": 1, "time": 6.0, "reward": 0.25, "logprob_diff_mean": 0.0},
        {"phase": "rl", "step": 1, "time": 7.0, "reward": 0.75, "logprob_diff_mean": 0.0},
    ]
    lines = [json.dumps(row) for row in rows]
    (path / "metrics.jsonl").write_text("\n".join([lines[0], '{"torn', lines[1], "[1, 2]", lines[2]]) + "\n")
    (path / "events.jsonl").write_text(
        '{"role": "x", "event": "update"}\n{"time": 6.5, "event": "kill", "target": "w"}\n'
    )
    run = load_run(path)
    assert run.series("rl", "reward") == [(0.0, 0.5), (1.0, 0.75)], "of a repeated step the later row counts"
    assert run.series("rl", "entropy") == []
    assert run.outages[0].back is None
    assert any("report.json: not valid JSON" in note for note in run.notes)
    assert any("metrics.jsonl: 2 unreadable lines" in note for note in run.notes)
    assert Page(render(run)).open == []


def test_errors_name_the_path_and_what_was_expected(tmp_path: Path, run_path: Path) -> None:
    with pytest.raises(UserError, match=r"demos: no such directory; expected a run directory.*did you mean 'demo'"):
        load_run(run_path.parent / "demos")
    with pytest.raises(UserError, match=r"not a run directory; expected.*it holds runs.*demo"):
        load_run(run_path.parent)
    with pytest.raises(UserError, match=r"not a run directory; expected a run directory, one that holds config.txt"):
        load_run(tmp_path)
    with pytest.raises(UserError, match=r"config.txt: not a run directory"):
        load_run(run_path / "config.txt")


def test_hostile_rows_do_not_stop_the_report(tmp_path: Path) -> None:
    """Half of a surrogate pair, as a model may sample it, and a row nested deeper than the interpreter goes."""
    path = write_run(tmp_path / "odd", steps=20)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 20, "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    (path / "config.txt").write_bytes(b"\xff\xfe\x00binary")
    for sample in (path / "rollouts").glob("*.jsonl"):
        with sample.open("a") as file:
            file.write('{"step": 20, "prompt": "\\ud800", "answer": "\\udfff", "reward": 0.0}\n')
    page = Page(write_report(path).read_text(encoding="utf-8"))
    assert page.open == [] and "metrics.jsonl: 1 unreadable line skipped" in page.text


def test_the_tables_are_printed_where_the_page_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", steps=20)
    (path / "report.html").unlink(missing_ok=True)
    (path / "report.html").mkdir()  # not even root can replace a folder by a file
    assert main(["report", str(path)]) == 2
    printed = capsys.readouterr()
    assert "pass@1" in printed.out
    assert "cannot write the report" in printed.err and "--output" in printed.err
    assert main(["report", str(path), "--output", str(tmp_path / "elsewhere.html")]) == 0
    assert Page((tmp_path / "elsewhere.html").read_text(encoding="utf-8")).open == []
