"""The report of a run, built from a made-up run directory with a kill in the middle of RL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from mesh.errors import UserError
from tests.tools.report.made_up_run import SECTIONS, Page, section, table_text, write_run
from tools.commands.runs.report import command
from tools.report import charts, load_run
from tools.report.html import render


def test_a_finished_run_fills_every_section(source: str, page: Page) -> None:
    assert page.open == []
    for key in SECTIONS:
        content = section(source, key)
        assert "Empty:" not in content, key
        assert "<svg" in content or key in ("samples", "config"), key
    for heading in (
        "Staleness",
        "Trainer-sampler log-prob difference",
        "Importance ratio",
        "Throughput",
        "Entropy",
        "Kills",
        "Effective sample size",
        "Gradient norm by group of layers",
    ):
        assert f"<h3>{heading}</h3>" in source
    for curve in ("right", "wrong", "truncated", "attention", "norms"):  # in the keys of lengths and norms
        assert f"</i>{curve}</span>" in source or f"{curve}:" in source, curve
    assert len(source) < 1_500_000


def test_the_page_fetches_nothing_and_runs_nothing(source: str, page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href", "srcset", "action", "data"):
                assert value is not None and value.startswith("#"), (tag, name, value)
    assert "url(" not in source and "@import" not in source


def test_headline_and_tables_show_the_numbers_of_the_report(run_path: Path, page: Page) -> None:
    report = json.loads((run_path / "report.json").read_text())
    seen, terminal = page.text, table_text(run_path)
    for part in (
        report["before"],
        report["after"],
        *report["before"]["families"].values(),
        *report["after"]["families"].values(),
    ):
        for key in ("pass@1", "pass@8"):
            low, high = part[f"{key}_ci"]
            assert f"{100 * part[key]:.1f} {100 * low:.1f}–{100 * high:.1f}" in seen
            assert f"{100 * part[key]:.1f}  {100 * low:.1f}–{100 * high:.1f}" in terminal
        assert f"{100 * part['maj@8']:.1f}" in seen and f"{100 * part['maj@8']:.1f}" in terminal
    assert "maj@8  mean" in terminal and "The most frequent of 8 answers is right." in seen
    gain = 100 * (report["after"]["pass@1"] - report["before"]["pass@1"])
    assert f"{gain:+.1f} points" in seen and f"{gain:+.1f}" in terminal
    for words in ("7,012", "1.02, 2", "2.4e-7, 9.1e-6", "worker-1", "1.27 s"):
        assert words in terminal
    assert max(map(len, terminal.splitlines())) <= 80


def test_a_loss_is_shown_as_a_loss(tmp_path: Path) -> None:
    path = write_run(tmp_path / "worse", steps=20)
    report = json.loads((path / "report.json").read_text())
    report["before"], report["after"] = report["after"], report["before"]
    (path / "report.json").write_text(json.dumps(report))
    page = render(load_run(path))
    assert "\N{MINUS SIGN}17.7 points" in page and 'class="delta down"' in page
    assert "do not overlap: RL made it worse" in page


def test_invariants_are_on_the_page_and_a_broken_one_is_an_exit_status(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.txt").write_text("prompts_per_step: 1\nstaleness: 0\n")
    events = [
        {"time": 1.0, "role": "driver", "event": "phase_begin", "phase": "rl"},
        {"time": 2.0, "role": "trainer", "event": "push", "seconds": 0.1, "version": 0},
        {"time": 3.0, "role": "trainer", "event": "update", "seconds": 0.1, "step": 0},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    row = {"phase": "rl", "step": 1, "time": 3.0, "reward": 0.5, "staleness_max": 0}
    (path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    good = CliRunner().invoke(command, [str(path), "--check"])
    assert good.exit_code == 0 and "ages within the bound" in good.output
    (path / "metrics.jsonl").write_text(json.dumps({**row, "staleness_max": 3}) + "\n")
    bad = CliRunner().invoke(command, [str(path), "--check"])
    assert bad.exit_code == 1 and "age 3; the bound is 0" in " ".join(bad.output.split())
    assert "age 3; the bound is 0" in (path / "report.html").read_text()


def test_the_command_writes_the_page_and_prints_the_table(tmp_path: Path) -> None:
    path = write_run(tmp_path / "demo", steps=20)
    result = CliRunner().invoke(command, [str(path)])
    assert result.exit_code == 0, result.output
    assert (path / "report.html").is_file() and "pass@8  mean" in result.output
    assert not list(path.glob(".report*"))
    failed = CliRunner().invoke(command, [str(tmp_path / "demi")])
    assert isinstance(failed.exception, UserError)


def test_terms_of_a_reward_and_failures_of_its_scorer_are_shown(tmp_path: Path):
    (tmp_path / "config.txt").write_text("verifier.scorer.sandbox.allow_unisolated: True\n")
    rows = [{"phase": "rl", "step": n, "time": n, "reward": 0.1, "reward_term/shortness": n / 4} for n in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    failed = {
        "event": "score",
        "role": "worker-0",
        "time": 2.0,
        "answers": 8,
        "failed": 3,
        "error": "error: KeyError: 1",
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(failed) + "\n")
    run = load_run(tmp_path)
    assert run.notes == [
        "3 answers could not be scored; the last one: error: KeyError: 1",
        "answers may have run as code without isolation (allow_unisolated)",
    ]
    assert "Reward of shortness: 0.25 at first, 1.00 at last" in charts.term_multiples(run)
    assert charts.term_multiples(replace(run, metrics=[])) == ""
