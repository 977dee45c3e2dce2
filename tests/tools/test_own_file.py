"""A run from a user's own file, by the real command line from another folder: trained, resumed, reported and served."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from tests.rl.tiny import tiny_experiment


class OwnTokenizer(PhraseTokenizer):
    pass


def own_reward(question: str, answer: str) -> float:
    return float(answer.count("e"))


def mine():
    cfg = tiny_experiment(num_steps=2, evaluation=None)
    verifier = InlineVerifier.Config(scorer=FunctionScorer.Config(function=own_reward))
    return cfg.set(tokenizer=OwnTokenizer.Config(phrases=cfg.tokenizer.phrases), verifier=verifier)
"""


@pytest.mark.full
def test_a_run_of_the_users_own_file(tmp_path: Path, checkout: Path) -> None:
    for folder in ("lab", "home", "elsewhere"):
        (tmp_path / folder).mkdir()
    place, run = tmp_path / "lab" / "own_lab.py", tmp_path / "run"
    place.write_text(SOURCE)
    environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_STATE_HOME": str(tmp_path / "home")}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

    def axl(*words: str, cwd: str = "elsewhere", status: int = 0) -> str:
        command = [sys.executable, "-P", "-m", "axlearn_like", *words]
        done = subprocess.run(command, cwd=tmp_path / cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    train = ("rl", f"{place}:mine", "--runtime", "inprocess", "--run-dir", str(run))
    axl("rl", "own_lab.py:mine", *train[2:], cwd="lab")
    assert f"# code: {place}" in (run / "config.txt").read_text()
    assert str(run / "report.html") in axl("report", str(run))
    axl(*train)  # resumed: there is nothing left to do, and the config is the same
    assert "serving 'run'" in serve_once(run, environment, tmp_path / "elsewhere")
    moved = place.rename(tmp_path / "own_lab.py")
    said = axl("serve", str(run), status=2)
    assert f"{place} is not there any more; say where it is now: --code PATH/own_lab.py" in said
    assert "serving 'run'" in serve_once(run, environment, tmp_path / "elsewhere", "--code", str(moved))
    environment["XDG_STATE_HOME"] = str(tmp_path / "lab")  # another user, who never named the file
    (run / "config.txt").write_text((run / "config.txt").read_text().replace(str(place), str(moved)))
    assert f"if you trust that file, add --code {moved}" in axl("serve", str(run), status=2)


def serve_once(run: Path, environment: dict[str, str], cwd: Path, *words: str) -> str:
    """The first line of a server, which is then asked to end."""
    command = [sys.executable, "-P", "-m", "axlearn_like", "serve", str(run), "--port", "0", *words]
    with subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if re.search("^serving", line):
                server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, "".join(lines)
    return "".join(lines)
