"""Answers to wrong forms on the command line name the right one: experiments, run directories, data."""

from pathlib import Path

import click
import pytest

from tests.tools.test_second_runs import leaves
from tools.cli import cli, main

EXPERIMENT = """
from experiments.demo.config import demo
from experiments.registry import experiment


@experiment
def tuned(*, seed: int = 0):
    return demo(seed=seed)


def other():
    return demo()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of somebody who has an experiment, rows, a run and hidden folders."""
    (tmp_path / "mine.py").write_text(EXPERIMENT)
    (tmp_path / "plain.py").write_text("def one():\n    ...\n\n\ndef _two():\n    ...\n\n\ndef three():\n    ...\n")
    (tmp_path / "broken.py").write_text("def one(:\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "notes.md").write_text("notes")
    for hidden in (".ci", ".git", ".github"):
        (tmp_path / hidden).mkdir()
    (tmp_path / "runs" / "tuned").mkdir(parents=True)
    (tmp_path / "runs" / "tuned" / "config.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TOKENIZER = "data train-tokenizer {} --field prompt --vocab-size 300 --out out"
FILTER = "data filter {} --field prompt --out out.jsonl"


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("rl mine.py", "mine.py is a file: name one of its functions: mine.py:tuned\n"),
        ("train mine:tuned", "no module 'mine' (in 'mine'); a file is named with its ending: mine.py"),
        ("train mine", "mine.py is a file: name one of its functions: mine.py:tuned\n"),
        (
            "launch ./plain.py --on local",
            "plain.py is a file: name one of its functions: plain.py:one, plain.py:three\n",
        ),
        ("rl broken", "broken.py cannot be read: invalid syntax"),
        ("rl mine.py:tund", "mine.py has no function 'tund'; did you mean 'tuned'?"),
        ("rl main.py", "no file main.py; did you mean 'mine.py'"),
        ("rl nowhere.py", "; expected FILE.py:FUNCTION, or an experiment's name"),
        ("rl runs/tuned", "it is a run directory: name its experiment, with --run-dir runs/tuned"),
        ("eval nowhere", "no run directory, model's directory or experiment 'nowhere'"),
        ("eval tuned", "no directory or experiment 'tuned'; did you mean 'runs/tuned'?"),
        ("serve runs/tuend", "no directory runs/tuend; did you mean 'runs/tuned'?"),
        ("replay runs/tuend --update 2", "'runs/tuend' does not exist; did you mean 'tuned'?"),
        ("bisect runs/tuned runs/tunde", "'runs/tunde' does not exist; did you mean 'tuned'?"),
        ("publish runs/tuend", "'runs/tuend' does not exist; did you mean 'tuned'?"),
        ("worker runs/tuend", "'runs/tuend' does not exist; did you mean 'tuned'?"),
        ("verify run notse.md", "'notse.md' does not exist; did you mean 'notes.md'?"),
        ("runs rnus", "rnus: no such directory; expected one that holds run directories; did you mean 'runs'?"),
        ("runs mine.py", "mine.py: is a file; expected one that holds run directories"),
        ("publish runs/tuned --out runs", "File 'runs' is a directory"),
        ("report runs/tuned --output runs", "File 'runs' is a directory"),
        ("compare runs/tuned runs/tuned --out runs", "File 'runs' is a directory"),
        ("eval runs/tuned --out mine.py", "Directory 'mine.py' is a file"),
        ("eval demo --random-weights --tasks train.jsonl", "expected NAME=FILE, such as train=train.jsonl"),
        ("eval demo --random-weights --tasks gsm8k", "--tasks gsm8k: expected the file of its rows, gsm8k=FILE"),
        ("report --run-dir runs/tuned", "No such option '--run-dir'. A run is named so: axl report RUN"),
        ("watch --run runs/tuned", "A run is named so: axl watch [RUN]"),
        ("worker --run-dir runs/tuned", "A run is named so: axl worker RUN"),
        ("convert export --run-dir runs/tuned out", "A run is named so: axl convert export"),
        ("train demo runs/tuned", "A run directory is an option here: --run-dir DIR"),
        ("rl demo --run runs/tuned", "A run is named so: --run-dir DIR"),
        (FILTER.format("tran.jsonl"), "no file matches tran.jsonl; did you mean 'train.jsonl'?"),
        (FILTER.format("rows"), "no file matches rows"),
        (TOKENIZER.format("."), ". is a folder, expected files, such as *.jsonl or *.md or *.py"),
        (TOKENIZER.format("runs"), "runs is a folder, expected files\n"),
        (FILTER.format("rows/train.jsonl"), "there is no folder rows; known: runs"),
    ],
)
def test_a_wrong_form_is_answered_with_the_right_one(
    typed: str, right: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    said = capsys.readouterr().err
    assert right in said
    assert ".git" not in said


def test_an_evaluation_is_compared_with_one_that_there_is_before_it_draws(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs" / "eval" / "base").mkdir(parents=True)
    (here / "runs" / "eval" / "base" / "samples.jsonl").write_text("{}\n")
    assert main("eval demo --random-weights --problems 1 --samples 1 --against runs/eval/bse".split()) == 2
    assert (
        "runs/eval/bse has no samples of an evaluation (samples.jsonl); did you mean 'base'?" in capsys.readouterr().err
    )
    assert not (here / "runs" / "eval" / "demo").exists()


def test_a_missing_file_names_files_of_its_kind_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FILTER.format("xyzzy12345.parquet").split()) == 2
    taken = f"a relative path is taken from the working directory, {here}"
    assert capsys.readouterr().err == f"axl: error: no file matches xyzzy12345.parquet; {taken}\n"
    assert main("models list --run-dir x".split()) == 2
    assert "A run is named so" not in capsys.readouterr().err  # no run is named there


# Numbers that the experiment, the launch or the simulation refuses by name.
_PRICES = ("--price", "--worker-price", "--reference-price")
CHECKED_BEHIND = {"--kill-worker-after", *_PRICES, "--hours", "--growth", "--back-s"}


def test_every_option_that_is_a_number_refuses_what_is_none() -> None:
    taken = list[str]()
    for words in leaves(cli):
        context, command = click.Context(cli), cli
        for word in words.split():
            assert isinstance(command, click.Group)
            command = command.get_command(context, word)
        assert command is not None
        for option in command.params:
            if isinstance(option.type, click.types.FloatParamType) and not CHECKED_BEHIND & {*option.opts}:
                try:
                    click.types.ParamType.__call__(option.type, "nan", option, context)
                except click.BadParameter:
                    continue
                taken.append(f"{words} {option.opts[0]}")
    assert taken == []


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("doctor --seconds -1", "Invalid value for '--seconds': -1.0 is not in the range x>=1"),
        ("data dedup rows.jsonl --out o.jsonl --threshold nan", "Invalid value for '--threshold': 'nan' is no finite"),
        ("data filter rows.jsonl --out o.jsonl --shortest -5", "Invalid value for '--shortest': -5 is not in the"),
    ],
)
def test_a_number_beyond_its_bounds_is_refused_by_the_option(
    typed: str, right: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    assert right in capsys.readouterr().err


RELATIVE = """
from axlearn_like.input import JsonLines, SupervisedInput
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from experiments.demo.config import demo_sft


def in_files():
    rows = JsonLines.Config(files="train.jsonl", tokenizer=ByteTokenizer.Config())
    return demo_sft().set(input=SupervisedInput.Config(source=rows, seq_len=64, batch_size=8))


def in_tokenizer():
    cfg = in_files()
    cfg.input.source.tokenizer = HuggingFaceTokenizer.Config(path="tokenizer")
    return cfg
"""


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ("in_files", "in_files.input.source: no file matches train.jsonl; "),
        ("in_tokenizer", "in_tokenizer.input.source.tokenizer: tokenizer does not exist: expected a directory"),
    ],
)
def test_a_relative_path_of_a_config_is_named_with_its_field_and_folder(
    function: str, wanted: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")  # else it chooses their number
    (here / f"{function}.py").write_text(RELATIVE)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["train", f"{here}/{function}.py:{function}"]) == 2
    said = capsys.readouterr().err
    assert wanted in said
    assert f"; a relative path is taken from the working directory, {here}/elsewhere" in said
