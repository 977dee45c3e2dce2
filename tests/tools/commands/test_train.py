"""`axl train` by several processes: what is refused; how they train is in tests/axlearn_like."""

import pytest

from axlearn_like.trainer import Trainer
from tests.axlearn_like.tiny import tiny_trainer
from tools.cli import EXIT_USER_ERROR, main


def two_ways() -> Trainer.Config:
    """On a mesh of two devices."""
    return tiny_trainer(2, mesh={"fsdp": 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2"], "--meet HOST:PORT, the same for all"),
        (["--processes", "2", "--meet", "there"], "--meet HOST:PORT, the same for all"),
        (["--processes", "2", "--process", "2", "--meet", "127.0.0.1:1"], "expected --process from 0 to 1"),
        (["--process", "1"], "expected --process from 0 to 0"),
        (["--processes", "3", "--meet", "127.0.0.1:1"], "has 2 devices, which do not divide over 3 processes"),
    ],
)
def test_processes_that_cannot_meet_are_refused(arguments, message, capsys, tmp_path):
    experiment = f"{__name__}:{two_ways.__name__}"
    assert main(["train", experiment, "--run-dir", str(tmp_path / "run"), *arguments]) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
