"""`axl rl --reward my_file.py:score`: the reward of a user's own file, by its terms in the metrics of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from axlearn_like.config import trusted_code
from axlearn_like.config.consent import user_memory
from axlearn_like.run.metrics import read_rows
from experiments.start.options import StartOptions
from tools.experiment.start import RunOptions, begin

SOURCE = """
from tests.rl.tiny import tiny_experiment


def mine():
    return tiny_experiment(num_steps=2, evaluation=None)


def score(answer, tokens, question, finish_reason):
    assert question and finish_reason in ("stop", "length")
    return {"short": 1.0 - len(tokens) / 10, "ascii": float(answer.isascii())}


def fail(answer):
    raise OSError("the answer key is missing")
"""


def test_the_file_of_a_reward_is_remembered_for_an_experiment_as_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(trusted_code, "_files", {})
    monkeypatch.setenv(trusted_code.VARIABLE, "")
    place = tmp_path / "remembered_reward_lab.py"
    place.write_text("def score(answer):\n    return 1.0\n")
    run = RunOptions("demo", (), (), None, None, force=False, quiet=True)
    assert begin("rl", run, StartOptions(reward=f"{place}:score"))[2] is None
    assert str(place) in user_memory("code.txt")


@pytest.mark.full
def test_a_reward_from_a_file(tmp_path: Path, checkout: Path):
    place = tmp_path / "own_reward_lab.py"
    place.write_text(SOURCE)
    environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_STATE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}

    def run(reward: str, name: str) -> subprocess.CompletedProcess[str]:
        arguments = ["rl", f"{place}:mine", "--runtime", "inprocess", "--run-dir", str(tmp_path / name)]
        command = [sys.executable, "-m", "axlearn_like", *arguments, "--reward", f"{place}:{reward}"]
        return subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True, check=False)

    done = run("score", "run")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["phase"] == "rl"]
    assert len(rows) == 2
    for row in rows:
        assert row["reward"] == pytest.approx(row["reward_term/score"])
        assert row["reward"] == pytest.approx(row["reward_term/short"] + row["reward_term/ascii"])
        assert row["verifier_failures"] == 0
    missing = run("points", "other")
    assert missing.returncode != 0
    assert "is no function: own_reward_lab.py has" in missing.stderr
    failing = run("fail", "third")  # too few answers for the rule that ends a run: the report and the check say it
    check = [sys.executable, "-m", "axlearn_like", "report", str(tmp_path / "third"), "--check"]
    told = subprocess.run(check, env=environment, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert failing.returncode == 0 and told.returncode == 1
    assert "could be scored; error: OSError: the answer key is missing" in " ".join(told.stdout.split())
