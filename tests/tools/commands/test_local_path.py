"""URLs that a command does not take: refused before any work, with nothing left behind."""

from pathlib import Path

import pytest

from axlearn_like.run.directory import RunDirectory
from mesh.errors import UserError
from tools import cli
from tools.experiment import AnyPath

URL = "gs://bucket/x"
LOCAL = {  # commands that write there, or need a file of this machine
    "report output": ("report", ".", "--output", URL),
    "eval out": ("eval", "demo", "--out", URL),
    "serve adapters": ("serve", "demo", "--adapters-from", URL),
    "tokenizer": ("data", "train-tokenizer", URL, "--out", "tokenizer"),
    "split": ("data", "split", "rows.jsonl", "--train", URL, "--test", "test.jsonl"),
    "launch": ("launch", "demo", "--on", "local", "--storage", f"dir:{URL}"),
}
UNSERVED = "qs://bucket/x"
URLS = {  # commands that take the URL of a bucket
    "rl": ("rl", "demo", "--run-dir", UNSERVED),
    "train": ("train", "demo_sft", "--run-dir", UNSERVED),
    "report": ("report", UNSERVED),
    "eval": ("eval", UNSERVED),
    "serve": ("serve", UNSERVED),
    "import from": ("convert", "import", UNSERVED, "model"),
    "import to": ("convert", "import", ".", UNSERVED),
    "export from": ("convert", "export", UNSERVED, "model"),
    "export to": ("convert", "export", ".", UNSERVED),
    "models": ("models", "show", UNSERVED),
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *((arguments, "expected a local path, not a URL; write it here, and copy it") for arguments in LOCAL.values()),
        *((arguments, "no library serves qs://; known: abfs, gs, hf, memory, s3") for arguments in URLS.values()),
        (("train", "demo_sft", "--run-dir", "gs:/x"), "expected gs://x for a bucket, or ./gs:/x for a folder"),
        (("train", "demo_sft", "--run-dir", "s3://b/x"), "a library that is not installed: Install s3fs"),
    ],
    ids=[*LOCAL, *URLS, "one slash", "no library"],
)
def test_commands_refuse_urls(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out and not list(tmp_path.iterdir())


def test_a_folder_may_be_called_like_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert AnyPath(path_type=Path).convert("./gs:/x", None, None) == tmp_path / "gs:" / "x"
    with RunDirectory.open(tmp_path / "gs:" / "x", "num_steps: 1") as run:
        assert run.path == tmp_path / "gs:" / "x"


@pytest.mark.parametrize("path", [UNSERVED, Path(UNSERVED)])
def test_programs_are_refused_too(path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no library serves qs://"):
        RunDirectory.open(path, "num_steps: 1")
    assert not list(tmp_path.iterdir())
