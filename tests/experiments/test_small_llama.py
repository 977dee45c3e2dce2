"""The small model of our own trains on the published texts, and answers; its tokenizer is what the command makes."""

import gzip
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import to_text
from axlearn_like.input import InputError
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from experiments.registry import get
from experiments.small_llama import TOKENIZER
from tools import cli


@pytest.fixture
def some_data(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first lines of each file, in the folder that the experiment reads."""
    for name, lines in (
        ("gsm8k/train.jsonl.gz", 60),
        ("gsm8k/test.jsonl.gz", 20),
        ("text/tinyshakespeare.txt.gz", 400),
    ):
        target = tmp_path / "data" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = gzip.decompress((shared_data / name).read_bytes()).splitlines(keepends=True)[:lines]
        target.write_bytes(gzip.compress(b"".join(kept)))
    monkeypatch.setenv("AXL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "data"


@pytest.mark.full  # examples/ and tests of serving have the same code at a smaller size
def test_it_learns_and_its_run_answers(
    some_data: Path, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg: Any = get("small_llama")
    assert "$AXL_DATA" in to_text(cfg) and str(some_data) not in to_text(cfg)
    cfg.set(num_steps=6, log_every=1, evaluators=())
    cfg.input.set(batch_size=2, seq_len=64)
    cfg.learner.schedule.set(total_steps=6, warmup_steps=1)
    cfg.check()
    cfg.build().run(tmp_path / "run", progress=False)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert abs(rows[0]["loss"] - np.log(2048)) < 0.3 and rows[-1]["loss"] < rows[0]["loss"] - 0.2
    arguments = ["complete_text.py", str(tmp_path / "run"), "How many?", "How many?", "Tom has 3 apples."]
    monkeypatch.setattr(sys, "argv", arguments)
    printed: list[str] = []
    runpy.run_path(str(checkout / "examples" / "complete_text.py"), {"print": printed.append}, "__main__")
    one, same, other = printed
    assert one == same and other
    assert cli.main(["convert", "export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["bos_token_id"], config["eos_token_id"]) == ("llama", 0, 1)
    exported, own = HuggingFaceTokenizer.Config(path=str(tmp_path / "hf")).build(), TOKENIZER.build()
    assert exported.encode("Tom has 12 é") == own.encode("Tom has 12 é") and exported.stop_ids == own.stop_ids


@pytest.mark.slow
def test_without_the_texts_it_says_where_they_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AXL_DATA", raising=False)
    with pytest.raises(
        InputError, match="AXL_DATA is not set; it comes from https://github.com/openai/grade-school-math"
    ):
        get("small_llama").build().run(tmp_path / "run", progress=False)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.full
def test_the_tokenizer_is_what_the_command_makes_of_the_texts(
    shared_data: Path, checkout: Path, tmp_path: Path
) -> None:
    files = [str(shared_data / name) for name in ("gsm8k/train.jsonl.gz", "text/tinyshakespeare.txt.gz")]
    fields = ["--field", "question", "--field", "answer"]
    out = ["--vocab-size", "2048", "--out", str(tmp_path / "bpe"), "--quiet"]
    assert cli.main(["data", "train-tokenizer", *files, *fields, *out]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "bpe" / name).read_bytes() == (checkout / "experiments" / "small_bpe" / name).read_bytes()
    built = TOKENIZER.build()
    assert (built.vocab_size, built.bos, built.eos, built.pad) == (2048, 0, 1, 2)


def test_an_assistant_learns_its_turns_and_their_ends_alone(some_data: Path) -> None:
    source: Any = get("small_chat").input.source  # pyright: ignore[reportAttributeAccessIssue]
    built, tokenizer = source.build(), source.tokenizer.build()
    example, record = (
        built[0],
        json.loads(gzip.decompress((some_data / "gsm8k/train.jsonl.gz").read_bytes()).split(b"\n")[0]),
    )
    learned = example["tokens"][example["loss_mask"]].tolist()
    assert tokenizer.decode(learned[:-1]) == record["answer"] and learned[-1] == tokenizer.eos
    assert tokenizer.decode(example["tokens"][~example["loss_mask"]].tolist()).startswith(
        f"user:\n{record['question']}"
    )
