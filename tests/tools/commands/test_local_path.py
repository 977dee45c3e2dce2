"""URLs where a path of this machine is expected: refused before any work, with nothing left behind."""

from pathlib import Path

import pytest

from axlearn_like.run.directory import RunDirectory
from mesh.errors import UserError
from tools import cli

URL = "gs://bucket/x"
COMMANDS = {
    "rl": ("rl", "demo", "--run-dir", URL),
    "train": ("train", "demo_sft", "--run-dir", URL),
    "report": ("report", URL),
    "report output": ("report", ".", "--output", URL),
    "eval": ("eval", URL),
    "eval out": ("eval", "demo", "--out", URL),
    "serve": ("serve", URL),
    "serve adapters": ("serve", "demo", "--adapters-from", URL),
    "import from": ("convert", "import", URL, "model"),
    "import to": ("convert", "import", ".", URL),
    "export from": ("convert", "export", URL, "model"),
    "export to": ("convert", "export", ".", "s3://bucket/x"),
    "tokenizer": ("data", "train-tokenizer", URL, "--out", "tokenizer"),
    "split": ("data", "split", "rows.jsonl", "--train", URL, "--test", "test.jsonl"),
    "models": ("models", "show", URL),
    "launch": ("launch", "demo", "--on", "local", "--storage", f"dir:{URL}"),
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_commands_refuse_urls(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert "expected a local path, not a URL" in printed.err and "://bucket/x" in printed.err
    assert not printed.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [URL, Path(URL), "file:///x"])
def test_programs_are_refused_too(path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="expected a local path, not a URL"):
        RunDirectory.open(path, "num_steps: 1")
    assert not list(tmp_path.iterdir())
