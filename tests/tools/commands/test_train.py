"""Refusals of `axl train` before anything is made; tests of the training itself are in tests/axlearn_like."""

import contextlib
import io
from pathlib import Path

import pytest

from axlearn_like.training.trainer import Trainer
from tests.axlearn_like.tiny import tiny_trainer
from tests.elsewhere import elsewhere
from tools.cli import EXIT_USER_ERROR, main


def two_ways() -> Trainer.Config:
    """Tiny experiment on a mesh of two devices."""
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "input.batch_size=24"], "parts: expected a divisor of input.batch_size, 24, got 16"),
        (["--set", "input.batch_size=16", "--set", "elastic.parts=5"], "parts: expected a divisor of input.batch_size"),
        (["--set", "input.batch_size=16", "--set", "microbatches=2"], "microbatches: expected 1 with elastic"),
        (["--set", "input.batch_size=16", "--members", "17"], "parts: expected 17 or more: each of 17 members"),
        (
            ["--set", "input.batch_size=16", "--processes", "2", "--meet", "127.0.0.1:1"],
            "--members 2 and --processes 2: expected one of them",
        ),
    ],
)
def test_members_that_cannot_share_a_batch_are_refused(arguments, message, capsys, tmp_path):
    experiment = f"{__name__}:{tiny.__name__}"
    command = ["train", experiment, "--run-dir", str(tmp_path / "run"), "--members", "2", *arguments]
    assert main(command) == EXIT_USER_ERROR
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def tiny() -> Trainer.Config:
    """8 rows of 16 tokens; width 16, 2 heads, 32 words, 2 layers."""
    return tiny_trainer(2)


# Edits -> what is said, on eight devices.
REFUSED = {
    "mesh={'fsdp':3}": ["mesh fsdp 3 needs 3 devices but there are 8 (cpu); fsdp 8 would fit"],
    "mesh={'data':4} slices={'data':3}": ["mesh data 4 needs 4 devices"],
    "mesh={'data':4,'fsdp':2} slices={'data':4,'fsdp':4}": ["slices data 4 x fsdp 4 is for 16 slices but there is 1"],
    "mesh={'data':4,'fsdp':2} slices={'data':1,'fsdp':4}": ["'fsdp' has size 2, no multiple of slices.fsdp=4"],
    "mesh={'fsdp':8} input.batch_size=12": ["input.batch_size: expected a multiple of 8"],
    "mesh={'data':2,'tensor':4}": ["model.block.attention: ", "num_kv_heads=2 do not divide", "(tensor 4)"],
    "mesh={'fsdp':8} model.dim=20": ["model.embedding: dimension 1 (embed)", "(32, 20) is 20", "(fsdp 8)"],
    "mesh={'data':4,'tensor':2} model.block.feed_forward.hidden=25": [
        "model.block.feed_forward: dimension 1 (hidden) of a parameter of shape (16, 25) is 25", "(tensor 2)",
    ],
    "mesh={'pipeline':2,'data':4}": ["8 rows does not divide into 8 microbatches (Pipeline.Config.microbatches)"],
    "mesh={'data':4,'sequence':2} input.seq_len=18": [
        "input.seq_len: expected a multiple of 4: two parts for each device", "got 18",
    ],
    "mesh={'sequence':8} input.seq_len=12": [
        "input.seq_len: expected a multiple of 16: two parts for each device", "got 12",
    ],
    "model.block.attention.rope.max_length=8": [
        "input.seq_len is 16, but ", "rope.max_length is 8",
    ],
    "model.remat=everythin": ["model: remat: no preset 'everythin'; did you mean 'everything'"],
}  # fmt: skip


def test_what_cannot_be_is_refused_before_there_is_a_run(tmp_path):
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    found = elsewhere(refuse, list(REFUSED), str(tmp_path / "run"), environ=environ)
    for edits, expected in REFUSED.items():
        status, message = found[edits]
        assert status == EXIT_USER_ERROR and all(part in message for part in expected), (edits, message)
    assert list(tmp_path.iterdir()) == []


def refuse(lines: list[str], run_dir: str) -> dict[str, tuple[int, str]]:
    """Exit status and message by edits."""
    messages = {}
    for line in lines:
        err, edits = io.StringIO(), [word for edit in line.split() for word in ("--set", edit)]
        with contextlib.redirect_stderr(err):
            status = main(["train", f"{__name__}:{tiny.__name__}", "--quiet", "--run-dir", run_dir, *edits])
        messages[line] = status, err.getvalue()
        if Path(run_dir).exists():
            break  # it was not refused in time
    return messages
