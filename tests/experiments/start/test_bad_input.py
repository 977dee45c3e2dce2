"""Each mistake is one message before anything is spent."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mesh.files.bucket import Bucket
from tests.experiments.start.conftest import write_lines
from tools.cli import main

RL = "rl --model small --data rows.jsonl"
TRAIN = "train --model small --data rows.jsonl"


def remove(name: str) -> Callable[[], None]:
    return lambda: os.remove(f"small/{name}")


def rows(*found: Mapping[str, object]) -> Callable[[], None]:
    return lambda: write_lines(Path("rows.jsonl"), *found) and None


def failing() -> None:
    Path("reward.py").write_text("def score(answer, reference):\n    return 1 / (len(reference) - 1)\n")


def begun(run: str, *phase: str) -> Callable[[], None]:
    """Make a run that has its first checkpoint."""
    return lambda: Path("runs", run, "checkpoints", *phase, "1").mkdir(parents=True)


def in_bucket() -> None:
    Bucket("memory://full/model", "test").write("config.json", b"{}")


def chats() -> None:
    fields = json.loads(Path("small/tokenizer_config.json").read_text())
    fields.pop("chat_template", None)
    Path("small/tokenizer_config.json").write_text(json.dumps(fields))
    Path("small/chat_template.jinja").unlink(missing_ok=True)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_lines(Path("rows.jsonl"), *[{"messages": said}] * 12)


LONG = [{"prompt": "word " * 300, "answer": "1"}] * 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "change", "wanted"),
    [
        ("rl --model smal --data rows.jsonl", None, "smal: there is no such directory; did you mean 'small'?"),
        ("rl --model . --data rows.jsonl", None, "expected a directory with config.json, *.safetensors"),
        (RL, remove("tokenizer.json"), "tokenizer"),
        (RL, remove("model.safetensors"), "safetensors"),
        ("rl --model small", None, "--data FILE"),
        ("rl --data rows.jsonl", None, "--data needs --model DIR"),
        ("rl", None, "expected EXPERIMENT, or --model DIR and --data FILE"),
        ("rl demo --model small --data rows.jsonl", None, "expected one of them"),
        ("train small_llama --pairs", None, "--pairs needs --model DIR"),
        ("rl --model small --data row.jsonl", None, "--data row.jsonl: no file matches"),
        ("train --model small --data row.jsonl", None, "did you mean 'rows.jsonl'?"),
        (f"{RL} --export rows.jsonl", None, "rows.jsonl: expected a directory, got a file"),
        (f"{TRAIN} --export small", None, "--export small: has a model already; expected a directory that is not"),
        (f"{TRAIN} --export .", None, "--export . expects a directory that does not exist yet, or is empty"),
        (f"{TRAIN} --steps 2 --export small", begun("small-rows-sft"), "--export small: has a model already"),
        (f"{RL} --steps 2 --export small", begun("small-rows", "rl"), "--export small: has a model already"),
        (f"{RL} --export memory://full/model", in_bucket, "--export: memory://full/model holds files already"),
        ("rl demo --export memory://full/model", in_bucket, "--export: memory://full/model holds files already"),
        (f"{TRAIN} --columns prompt=a,prompt=b", None, "--columns prompt: expected once, got a and b"),
        ("rl demo --export rows.jsonl", None, "rows.jsonl: expected a directory, got a file"),
        ("rl demo --reward rewrad.py:score", failing, "rewrad.py; did you mean 'reward.py'?"),
        (f"{RL} --heldout held.jsonl", None, "--heldout held.jsonl: no file matches"),
        ("rl --model small --data memory://none/rows.jsonl", None, "error: --data: memory://none/rows.jsonl holds"),
        ("train --model small --data memory://none/rows.jsonl", None, "error: --data: memory://none/rows.jsonl holds"),
        (f"{RL} --heldout memory://none/rows.jsonl", None, "error: --heldout: memory://none/rows.jsonl holds"),
        ("rl --model memory://none/small --data rows.jsonl", None, "error: --model: memory://none/small holds"),
        (RL, lambda: Path("rows.jsonl").write_text(""), "is empty"),
        (RL, rows({"body": "a", "anser": "1"}), "body"),
        (RL, rows({"prompt": "a"}, {"prompt": "b"}), "--reward FILE.py:FUNCTION"),
        (TRAIN, rows({"prompt": "a"}, {"prompt": "b"}), "answer"),
        (f"{TRAIN} --pairs", None, "chosen"),
        (TRAIN, chats, "its rows are conversations, and the tokenizer of"),
        (f"{RL} --reward reward.py:score", chats, "has no chat template"),
        (RL, rows(*LONG), "96 positions"),
        (TRAIN, rows(*LONG), "96 positions"),
        (f"{RL} --reward reward.py:scor", None, "scor"),
        (f"{RL} --reward reward.py:score", failing, "rows.jsonl, line 1: ZeroDivisionError: division by zero"),
        (f"{RL} --steps 0", None, "--steps 0: expected 1 or more"),
        (f"{RL} --save-experiment my-run.py", None, "expected a name such as mine.py"),
        (f"{TRAIN} --processes 2 --meet 127.0.0.1:1", None, "--save-experiment FILE.py"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_written(
    model: Path, capsys: pytest.CaptureFixture[str], command: str, change: Callable[[], object] | None, wanted: str
) -> None:
    if change is not None:
        change()
    before = sorted(Path().rglob("*"))
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("axl: error: ")]
    assert len(errors) == 1 and wanted in said, said
    made = [path for path in sorted(Path().rglob("*")) if path not in before and "__pycache__" not in path.parts]
    assert made == []


def test_a_reward_that_fails_is_shown_with_the_line_of_its_file(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing()
    assert main(f"{RL} --reward reward.py:score".split()) == 2
    said = capsys.readouterr().err
    assert "reward.py, line 2, in score" in said and "it was given the answer '0'" in said


def test_a_damaged_config_names_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "hidden_size": 33}))
    assert main(RL.split()) == 2
    assert "--model" in capsys.readouterr().err
