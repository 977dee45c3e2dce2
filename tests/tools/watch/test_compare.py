"""`axl compare`: figures and configs of runs side by side, in the terminal and as a page."""

from pathlib import Path

import pytest

from tests.tools.report.made_up_run import Page, write_run
from tools.cli import EXIT_USER_ERROR, main

CONFIG = "rl.experiment:RLExperiment\nname: '<b>'\nnum_steps: {steps}\npool: {pool}\ntrainer.lr: {lr}\n"


def runs(folder: Path, count: int) -> list[str]:
    paths = [write_run(folder / f"seed{n}" / "run", steps=30 + n, kill=False) for n in range(count)]
    for n, path in enumerate(paths):
        pool = "None" if n else "rl.pool:Pool\npool.size: 3\npool.wide['a: b']: (1, 2)"
        (path / "config.txt").write_text(CONFIG.format(steps=30 + n, lr=10.0**-n, pool=pool))
    return [str(path) for path in paths]


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs(tmp_path, 2), "--out", str(tmp_path / "both.html")]) == 0
    text = capsys.readouterr().out
    for words in (
        "seed0/run",
        "rl/reward",
        "sft/loss",
        "trainer.lr  1.0           0.1",
        "num_steps   30            31",
    ):
        assert words in text, text
    assert "pool.size" not in text  # says nothing beyond that the one has a pool
    source = (tmp_path / "both.html").read_text()
    page = Page(source)
    words = " ".join(page.words)
    assert page.open == [] and "default-src 'none'" in source and "script" not in {tag for tag, _ in page.tags}
    assert "seed1/run" in words and "rl/reward" in words and "trainer.lr" in words
    assert sum(tag == "figure" for tag, _ in page.tags) == 3


def test_ten_runs_and_any_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ten = runs(tmp_path, 10)
    assert main(["compare", *ten, "--metric", "rl/staleness_max", "--metric", "sft/lr"]) == 0
    text = capsys.readouterr().out
    assert "rl/staleness_max" in text and "rl/reward" not in text and text.count("seed9/run") == 3


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, foreign = runs(tmp_path, 2), tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "a").touch()
    for arguments, words in (
        (two[:1], "got 1 run; expected 2 to 10"),
        (two[:1] * 2, "the same run twice"),
        (two * 6, "got 12 runs"),
        ([two[0], f"{tmp_path}/seed1/rum"], "rum: no such directory"),
        ([two[0], str(foreign)], "foreign: not a run directory"),
        (
            [*two, "--metric", "rl/rewrad"],
            "--metric rl/rewrad: no run has it; expected PHASE/NAME; did you mean 'rl/reward'",
        ),
        ([*two, "--out", "/nowhere/x.html"], "--out /nowhere/x.html: cannot be written"),
    ):
        assert main(["compare", *arguments]) == EXIT_USER_ERROR
        assert words in capsys.readouterr().err
