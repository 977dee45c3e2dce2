"""`axl simulate`: its output, and the refusals before anything is simulated."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler
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


@pytest.mark.full
@needs_tpu_compiler
def test_chips_of_two_kinds_are_searched_for_which_of_them_train():
    words = ["--set", "evaluation=None", "--updates", "3", "--durations", "compiled", "--duration", "score=1e-5"]
    command = [sys.executable, "-m", "tools.cli", "simulate", "demo", *words, "--search", "v5e=2,v6e=1", "--json"]
    done = subprocess.run(command, env=os.environ | TPU_COMPILER, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    ways = {"trainer=v6e:1x1,workers=2xv5e:1x1", "trainer=v5e:1x1,workers=1xv5e:1x1"}
    assert {row["fleet"] for row in found["fleets"]} == {*ways, "trainer=v5e:1x1,workers=1xv6e:1x1"}
    rates = [row["updates_per_hour"] for row in found["fleets"]]
    assert rates == sorted(rates, reverse=True) and not found["refused"]


@pytest.mark.full
@needs_tpu_compiler
def test_fleets_of_several_generations_are_compared_by_price():
    old, new = "trainer=v6e:1x1,workers=1xv5e:1x1", "trainer=v5e:1x1,workers=1xv6e:1x1"
    words = ["--set", "evaluation=None", "--updates", "4", "--durations", "compiled", "--duration", "score=1e-5"]
    priced = ["--price", "v5e=1", "--price", "v6e=3", "--objective", "cost"]
    command = [sys.executable, "-m", "tools.cli", "simulate", "demo", *words, "--fleet", old, "--fleet", new, *priced]
    done = subprocess.run(
        [*command, "--json"], env=os.environ | TPU_COMPILER, capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout.splitlines()[-1])["fleets"]
    assert {row["fleet"] for row in rows} == {old, new}
    assert rows[0]["cost_per_update"] < rows[1]["cost_per_update"]
    for row in rows:  # a chip of each kind in both
        assert row["cost"] == pytest.approx(4 * row["hours"], rel=0.05)


def test_failures_give_an_ettr(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "trace.csv").write_text("time,target\n30,trainer\n")
    found = said(capsys, "--trace", str(tmp_path / "trace.csv"), "--duration", "start_trainer=20", "--advice")
    assert found["kills"] == 1 and found["ettr"] < 0.9
    (undisturbed,) = (row for row in found["advice"] if "on demand" in row["change"])
    assert undisturbed["gain"] == pytest.approx(1 / found["ettr"] - 1, abs=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--duration", "worker_price=-1"], "durations.worker_price=-1.0; expected a finite number, 0 or more"),
        (["--lengths", "fixed:7"], "expected lengths of 1 to 6 tokens (max_new_tokens), got 7 to 7"),
        (["--hours", "0"], "--hours 0: expected more than 0"),
        (["--rate", "drivers=1"], "--rate drivers: there is no such role"),
        (["--rate", "worker"], "--rate 'worker': expected ROLE=N"),
        (["--rate", "worker=1", "--rate", "worker=2"], "--rate worker: expected once, got 1.0 and 2.0"),
        (["--price", "v5p=1", "--price", "v5p=2"], "--price v5p: expected once, got 1.0 and 2.0"),
        (["--duration", "score=1"], "--duration score: expected once, got 0.5 and 1.0"),
        (["--fleet", "workers=cpu:1,workers=cpu:2"], "--fleet workers: expected once, got cpu:1 and cpu:2"),
        (["--search", "workers=1..2", "--objective", "cost"], "--objective cost: there are no prices"),
        (["--price", "v5p"], "--price 'v5p': expected CHIP=DOLLARS an hour"),
        (["--price", "v5p=4"], "--price v5p=4: no role is on such chips"),
        (
            ["--fleet", "trainer=v5e:1x1,workers=2xv6e:1x1", "--price", "v5e=1"],
            "(workers) has no price; expected --price v6e=",
        ),
        (["--fleet", "workers=cpu:1", "--fleet", "workers=cpu:2"], "--fleet: several have durations of their own"),
        (["--search", "v5e=4,v6e=4"], "--search v5e=4,v6e=4: fleets have durations of their own; expected --durations"),
        (["--search", "v5e=4", "--durations", "compiled", "--workers", "3"], "expected no --fleet and no --workers"),
        (["--search", "v5e=4", "--durations", "compiled", "--objective", "cost"], "no prices"),
        (["--search", "v5e=four", "--durations", "compiled"], "--search 'v5e=four': expected workers=FIRST..LAST"),
        (["--search", "v5=4", "--durations", "compiled"], "no TPU generation 'v5'"),
        (["--search", "v5e=1", "--durations", "compiled"], "on no fleet of these chips; they are too few"),
        (["--search", "workers=2..1"], "--search 'workers=2..1': expected workers=FIRST..LAST"),
        (["--trace", __file__, "--rate", "worker=1"], "--trace and --rate are both of failures"),
        (["--growth", "nan"], "--growth nan: expected a share above -1"),
        (["--growth", "-5"], "--growth -5: expected a share above -1"),
        (["--rate", "worker=5", "--back-s", "-5"], "--back-s -5: expected seconds, 0 or more"),
        (["--rate", "worker=1e9"], "--rate worker=1e+09: expected at most 1,000,000 failures in 12 hours"),
        (["--lengths", "fxed:3"], "--lengths fxed:3: there is no such file or run; expected lognormal:MEAN,SIGMA,"),
        (["--durations", os.devnull], "has no durations; expected lines such as update = 5.0"),
        (["--durations", str(Path(__file__).parent)], "has no run; expected a run, a TOML or JSON table, or compiled"),
        (["--search", "worker=1..2"], "--search 'worker=1..2': expected workers=FIRST..LAST"),
        (["--search", "workers=1..2", "--run-dir", "sim"], "--run-dir: several fleets are simulated; expected one"),
        (["--search", "workers=1..2", "--advice"], "--advice: several fleets are simulated; expected one --fleet"),
        (["--search", "workers=1..2", "--workers", "3"], "--workers: several fleets are simulated"),
        # Before minutes of compilation, and before what the compiler needs.
        (["--durations", "compiled", "--hours", "0"], "--hours 0: expected more than 0"),
        (["--durations", "compiled", "--duration", "update=x"], "--duration 'update=x': expected update=NUMBER"),
        (["--run-dir", __file__], "is a file; expected a directory or a new path"),
        (["--set", "policies={'a': {}}"], "policies"),
    ],
)
def test_what_cannot_be_simulated_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert main(["simulate", TINY, *FAST, *words]) == 2
    assert message in capsys.readouterr().err
