"""Every command of `axl`, run twice with the same words: the second time all is done, and nothing changes."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from axlearn_like.training.trainer import Trainer
from tests.axlearn_like.tiny import ROOT, tiny_trainer
from tests.models.huggingface.checkpoints.made import dense_model, make
from tools import cli
from tools.launch.control.commands import COMMANDS as OF_LAUNCH

HERE = "tests.tools.test_second_runs"
MINE = "from tests.axlearn_like.tiny import tiny_trainer\n\n\ndef supervised():\n    return tiny_trainer(2)\n"
SHORT = "tests.rl.runtime.ray.experiments:short"


def supervised() -> Trainer.Config:
    """Two steps of a tiny model."""
    return tiny_trainer(2)


class Case(NamedTuple):
    """A command's words, with places; what the second run says; the exit status of both."""

    words: str
    again: str = ""
    status: int = 0


ROWS = "--field prompt --out {work}/kept.jsonl"
EVAL = "eval {rl} --problems 2 --samples 4 --out {work}/eval"
# Ran in `make test`.
QUICK = {
    "config list": Case("config list"),
    "config show": Case("config show demo"),
    "config diff": Case("config diff demo demo_sft"),
    "config kernels": Case("config kernels demo"),
    "train": Case(f"train {HERE}:supervised --run-dir {{work}}/train", "finished before, at step 2, loss "),
    "rl": Case(f"rl {SHORT} --run-dir {{rl}} --runtime inprocess", "finished before, at update 2: nothing is done"),
    "worker": Case("worker {rl}", "no run under Ray is active in {rl}", status=2),
    "eval": Case(EVAL, "finished before: {work}/eval has all answers"),
    "publish": Case("publish {rl} --out {work}/rl.axlrun", "2 updates, 32 rollouts"),
    "verify run": Case("verify run {published} --updates 1", "the same to the bit: 16 rollouts, 2 versions"),
    "verify explain": Case("verify explain --reference 42 --answer 42"),
    "convert import": Case("convert import {hf} {work}/imported", "finished before: {work}/imported is this import"),
    "convert export": Case("convert export {rl} {work}/exported", "finished before: {work}/exported has these bytes"),
    "models list": Case("models list qwen"),
    "models show": Case("models show Qwen2-0.5B"),
    "recipes": Case("recipes --model gemma-3-1b"),
    "data filter": Case(f"data filter {{rows}} --shortest 2 {ROWS}", "2 of 3 rows"),
    "data dedup": Case(f"data dedup {{rows}} {ROWS}", "2 of 3 rows"),
    "data decontaminate": Case(f"data decontaminate {{rows}} --against e={{other}} {ROWS}", "3 of 3 rows"),
    "data split": Case("data split {rows} --field day --from 2025-01-02 --train {work}/a.jsonl --test {work}/b.jsonl"),
    "data train-tokenizer": Case(
        "data train-tokenizer {rows} --field prompt --vocab-size 262 --out {work}/bpe --quiet", "finished before: "
    ),
    "launch": Case("launch {mine}:supervised --tpu v5e:1x1 --dry-run {work}/dry", "nothing was submitted"),
    "launch status": Case("launch status {rl}", "no run was launched in {rl}", status=2),
    "launch logs": Case("launch logs {rl}", "no run was launched in {rl}", status=2),
    "launch stop": Case("launch stop {rl}", "no run was launched in {rl}", status=2),
    "launch add-worker": Case("launch add-worker {rl}", "no run was launched in {rl}", status=2),
    "runs": Case("runs {rl}", "{rl}  finished"),
    "watch": Case("watch --once {rl}", "finished"),
    "simulate": Case(f"simulate {SHORT} --duration update=0.5", "all updates"),
    "replay": Case("replay {rl} --update 2", "metrics and weights are equal to the bit"),
    "bisect": Case("bisect {rl} {rl}", "the same run twice", status=2),
    "compare": Case("compare {rl} {rl}", "the same run twice", status=2),
    "report": Case("report {rl}", "report: {rl}/report.html"),
}
DIFFICULTY = "data difficulty {rows} --task mine --policy {rl} --samples 2 --out {work}/rated.jsonl"
# Commands that take seconds to minutes.
FULL = {
    "config features": Case("config features demo"),
    "data difficulty": Case(DIFFICULTY, "finished before: {work}/rated.jsonl.samples"),
}
# Not in this table: they measure again each time, and write into folders of their own, which they remove.
MEASURES = {
    "doctor",
    *(
        f"bench {name}"
        for name in (
            "bisect episodes experts grpo_step kernels policies recovery retrieval rollout serve simulate tiers verify "
            "weights"
        ).split()
    ),
}
# Nor are these: the first ends when it is told to (test_serve.py), the second writes what its options name.
OTHERS = {"serve", "service", "aot"}


def leaves(command: click.Command, words: str = "") -> Iterator[str]:
    """Yield the names of all commands."""
    if isinstance(command, click.Group):
        for name in command.list_commands(context := click.Context(command)):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, f"{words} {name}".strip())
    else:
        yield words


def test_no_command_is_missing() -> None:
    known = {*QUICK, *FULL, *MEASURES, *OTHERS}
    assert known == {*leaves(cli.cli), *(f"launch {name}" for name in OF_LAUNCH)}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Data, a model and a finished RL run, beside folders for results."""
    root = tmp_path_factory.mktemp("second")
    rows = [("a b c d", 1), ("a b c d", 2), ("e", 3)]
    lines = [json.dumps({"prompt": text, "answer": "x", "day": f"2025-01-0{day}"}) for text, day in rows]
    (root / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (root / "other.jsonl").write_text(json.dumps({"prompt": "zz yy"}) + "\n")
    (root / "second_job.py").write_text(MINE)
    make(root / "hf", dense_model())
    found = {name: str(root / name) for name in ("rl", "hf")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        assert cli.main(["rl", SHORT, "--run-dir", found["rl"], "--runtime", "inprocess"]) == 0
        found["published"] = str(root / "published.axlrun")
        assert cli.main(["publish", found["rl"], "--out", found["published"]]) == 0
    files = {"rows": "rows.jsonl", "other": "other.jsonl", "mine": "second_job.py"}
    return {**found, **{name: str(root / file) for name, file in files.items()}, "root": str(root)}


def tree(*folders: Path) -> dict[str, bytes]:
    """Return all files in folders, but for Python's byte code."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files if "__pycache__" not in path.parts}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_the_same_words_again_change_nothing(
    name: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = (QUICK | FULL)[name]
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.chdir(tmp_path)
    filled = {**places, "work": str(tmp_path)}
    words = case.words.format(**filled).split()
    assert cli.main(words) == case.status
    assert not capfd.readouterr().err.count("Traceback")
    before = tree(tmp_path, Path(places["root"]))
    assert cli.main(words) == case.status
    printed = capfd.readouterr()
    assert case.again.format(**filled) in printed.out + printed.err and printed.out + printed.err
    assert tree(tmp_path, Path(places["root"])) == before


CORPUS = [hashlib.sha256(f"{n // 2}".encode()).hexdigest().replace("a", " ").replace("5", " ") for n in range(4000)]
# Long enough to be interrupted -> the results that are the same to the byte as without.
INTERRUPTED = {
    "train": (f"train {HERE}:supervised --set num_steps=300 --run-dir {{work}}/run", "run/config.txt"),
    "rl": (f"rl {SHORT} --set num_steps=6 --run-dir {{work}}/run --runtime inprocess", "run/config.txt"),
    "eval": (EVAL.replace("--problems 2", "--problems 12"), "eval/*"),
    "convert import": ("convert import {hf} {work}/imported", "imported/checkpoints/0/params/**/*"),
    "convert export": ("convert export {rl} {work}/exported", "exported/*"),
    "data train-tokenizer": (
        "data train-tokenizer {corpus} --field prompt --vocab-size 2000 --out {work}/bpe --quiet", "bpe/*",
    ),
    "data dedup": (f"data dedup {{corpus}} {ROWS}", "kept*"),
}  # fmt: skip
LEFT = ("*.tmp", "*.partial", ".*.importing", ".*.exporting", ".undo.json", "*.part")


def start(words: str, work: Path, places: dict[str, str]) -> "subprocess.Popen[str]":
    filled = words.format(**places, work=work).split()
    command = [sys.executable, "-m", "tools.cli", *filled]
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    return subprocess.Popen(command, cwd=ROOT, env=environ, **out)


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", INTERRUPTED)
def test_what_was_interrupted_goes_on(
    name: str, signum: signal.Signals, places: dict[str, str], tmp_path: Path
) -> None:
    """Interrupt the same work at three moments, one after the other, then leave it alone."""
    words, result = INTERRUPTED[name]
    (corpus := tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in CORPUS))
    places, began = {**places, "corpus": str(corpus)}, time.monotonic()
    whole = start(words, tmp_path / "whole", places)
    assert whole.wait(300) == 0, whole.communicate()[0]
    seconds = time.monotonic() - began
    for share in (0.5, 0.7, 0.9):
        process = start(words, tmp_path / "parts", places)
        time.sleep(share * seconds)
        process.send_signal(signum)
        said, _ = process.communicate(timeout=120)
        assert "Traceback" not in said and process.returncode in (0, -signum, 128 + signum), said
    last = start(words, tmp_path / "parts", places)
    said, _ = last.communicate(timeout=300)
    assert last.returncode == 0, said
    wanted, found = (
        {
            str(path.relative_to(tmp_path / part)): path.read_bytes()
            for path in (tmp_path / part).glob(result)
            if path.is_file()
        }
        for part in ("whole", "parts")
    )
    assert wanted and found.keys() == wanted.keys()
    assert [one for one in found if found[one].replace(b"/parts", b"/whole") != wanted[one]] == []
    assert [path for pattern in LEFT for path in (tmp_path / "parts").rglob(pattern)] == []
