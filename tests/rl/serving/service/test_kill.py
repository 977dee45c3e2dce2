"""A service process that is killed twice, where it hurts most, and a third that goes on: equal to one undisturbed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rl.serving.service.services import WAIT, A, B, ask, make_service, requests, state_bits

PASS_OF_B = 9  # the place in `requests()` of the pass before B's second step


@pytest.mark.full
def test_killed_between_gradient_and_step_and_in_the_middle_of_a_save(tmp_path: Path):
    assert [verb for _, _, _, verb in requests()[PASS_OF_B : PASS_OF_B + 3]] == ["pass", "step", "step"]
    undisturbed = make_service(tmp_path / "undisturbed", steps=1000)
    for future in [ask(undisturbed, request) for request in requests()]:
        future.result(WAIT)
    expected = [state_bits(undisturbed, model) for model in (A, B)]
    files = {path: path.read_bytes() for path in saved(tmp_path / "undisturbed")}
    undisturbed.close()

    folder = tmp_path / "killed"
    killed(folder, "accepted", PASS_OF_B)
    assert not saved(folder)
    killed(folder, "saving", 5)  # the journal, the snapshots of both, and the save of A have come
    halves = [path.parent.parent.parent.name for path in folder.rglob("*.half")]
    assert halves == ["t2"], "half of what the second tenant saves"
    service = make_service(folder)
    for future in [ask(service, request) for request in requests()[12:]]:
        future.result(WAIT)
    assert [state_bits(service, model) for model in (A, B)] == expected
    service.close()
    assert [path.read_bytes() for path in saved(folder)] == list(files.values())


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("saved/**/*.safetensors"))


def killed(folder: Path, what: str, number: int) -> None:
    """Run a service process on the folder until it has killed itself."""
    command = [sys.executable, "-m", "tests.rl.serving.service.services", str(folder), what, str(number)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
