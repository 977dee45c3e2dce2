"""`axl simulate`: its output, and the refusals before anything is simulated."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.cli import main

TINY = "tests.tools.commands.test_simulate:tiny"
FAST = ["--duration", "decode_step=1", "--duration", "score=0.5", "--duration", "update=3", "--lengths", "fixed:5"]


def tiny():
    """Six updates of a tiny experiment."""
    from tests.rl.tiny import tiny_experiment

    return tiny_experiment(num_steps=6, evaluation=None, workers=1)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", TINY, *FAST, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_rates_cost_and_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found = said(capsys, "--advice", "--duration", "worker_price=36", "--run-dir", str(tmp_path / "run"))
    assert found["updates"] == 6 and found["finished"]
    assert found["cost"] == pytest.approx(36 * found["hours"])
    advice = {row["change"]: row["gain"] for row in found["advice"]}
    assert advice["staleness=1"] > 0.1 and advice["one more worker"] > 0.2  # 21 s an update, then 18, then 16
    assert (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_fleets_are_searched_by_time_and_by_cost(capsys: pytest.CaptureFixture[str]):
    priced = ["--duration", "worker_price=10", "--search", "workers=1..3"]
    by_time, by_cost = (said(capsys, *priced, "--objective", one)["fleets"] for one in ("time", "cost"))
    assert [row["workers"] for row in by_cost] == [1, 2, 3]
    assert by_time[0]["workers"] > 1


def test_failures_give_an_ettr(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "trace.csv").write_text("time,target\n30,trainer\n")
    found = said(capsys, "--trace", str(tmp_path / "trace.csv"), "--duration", "start_trainer=20")
    assert found["kills"] == 1 and found["ettr"] < 0.9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--duration", "worker_price=-1"], "durations.worker_price=-1.0; expected a finite number, 0 or more"),
        (["--lengths", "fixed:7"], "expected lengths of 1 to 6 tokens (max_new_tokens), got 7 to 7"),
        (["--hours", "0"], "--hours 0: expected more than 0"),
        (["--rate", "drivers=1"], "--rate drivers: there is no such role"),
        (["--rate", "worker"], "--rate 'worker': expected ROLE=N"),
        (["--search", "workers=1..2", "--objective", "cost"], "--objective cost: there are no prices"),
        (["--search", "workers=2..1"], "--search 'workers=2..1': expected workers=FIRST..LAST"),
        (["--trace", __file__, "--rate", "worker=1"], "--trace and --rate are both of failures"),
        (["--set", "policies={'a': {}}"], "policies"),
    ],
)
def test_what_cannot_be_simulated_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert main(["simulate", TINY, *FAST, *words]) == 2
    assert message in capsys.readouterr().err
