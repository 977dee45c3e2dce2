"""Training of a tokenizer, and `axl data train-tokenizer`: small, repeatable, and what transformers reads."""

import gzip
import json
import re
import time
from pathlib import Path

import pytest

from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.train import BOS, EOS, LEAST, PAD, SPECIAL
from tools import cli

LINES = [{"q": "How many apples are 12 and 30 apples?", "a": "There are 42 apples."}, {"q": "Why?", "a": "So, é."}] * 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.txt").write_text("Many apples are many apples.\n\nThe apples there.\n" * 10)
    return tmp_path


def train(folder: Path, *more: str, out: str = "bpe", size: int = 300) -> int:
    files = [str(folder / "a.jsonl.gz"), str(folder / "b.txt")]
    arguments = ["--vocab-size", str(size), "--out", str(folder / out), "--quiet", *more]
    return cli.main(["data", "train-tokenizer", *files, *arguments])


def test_the_same_files_give_the_same_tokenizer_and_its_texts_survive(folder: Path, capsys: pytest.CaptureFixture[str]):
    for out in ("one", "two"):
        assert train(folder, "--field", "q", "--field", "a", out=out, size=280) == 0
    said = capsys.readouterr().out
    assert "one: 280 tokens from 0.00 million characters in " in said and "HuggingFaceTokenizer.Config(path='" in said
    first, second = (folder / out / "tokenizer.json" for out in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    built = HuggingFaceTokenizer.Config(path=str(folder / "one")).build()
    assert [built.token_id(text) for text in SPECIAL] == [0, 1, 2] == [built.bos, built.eos, built.pad]
    assert built.vocab_size == 280 and SPECIAL == (BOS, EOS, PAD)
    for text in ("How many apples?", "世界 never seen", "12345"):
        assert built.decode(built.encode(text)) == text
    assert len(built.encode(" apples")) == 1 and len(built.encode("12345")) == 5


def test_rows_of_any_format_give_the_same_tokenizer(folder: Path) -> None:
    text = "q,a\n" + "".join(f'"{line["q"]}","{line["a"]}"\n' for line in LINES)
    (folder / "a.csv").write_text(text)
    for name in ("a.jsonl.gz", "a.csv"):
        out = ["--field", "q", "--field", "a", "--vocab-size", "300", "--quiet", "--out", str(folder / f"of {name}")]
        assert cli.main(["data", "train-tokenizer", str(folder / name), *out]) == 0
    first, second = ((folder / f"of {name}" / "tokenizer.json").read_bytes() for name in ("a.jsonl.gz", "a.csv"))
    assert first == second


def test_a_text_with_few_tokens_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "--field", "q", size=5000) == 0
    printed = capsys.readouterr()
    assert "the text has no more than " in printed.err and "5000" not in printed.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "a.jsonl.gz has rows: name the field that holds the text (--field)"),
        (("--field", "question"), "line 1: there is no field 'question'; known: a, q"),
        (("--field", "q", "--vocab-size", "100"), f"a vocabulary of 100: expected {LEAST} or more"),
    ],
)
def test_mistakes_are_one_message(
    folder: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, *more) == 2
    said = capsys.readouterr().err
    assert message in said and not (folder / "bpe").exists()


def test_a_directory_with_a_tokenizer_and_files_that_are_none_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, "--field", "q") == 0
    before = (folder / "bpe" / "tokenizer.json").read_bytes()
    for more in (("--field", "a"), ("--field", "q", "--vocab-size", "290")):
        assert train(folder, *more) == 2
        assert "has a tokenizer.json already, of other texts or of another size" in capsys.readouterr().err
    assert (folder / "bpe" / "tokenizer.json").read_bytes() == before
    (folder / "empty.txt").write_text("")
    (folder / "c.md").write_text("text")
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 100)[:-9])
    for name, message in (
        ("b.text", "no file matches .*b.text; did you mean 'b.txt'"),
        ("empty.txt", "empty.txt is empty"),
        ("cut.txt.gz", "cut.txt.gz is a damaged gzip file"),
        ("bpe/tokenizer.json", "name the field that holds the text"),
        ("c.md", "c.md: expected a name that ends with one of .txt, .txt.gz, .jsonl"),
    ):
        out = ["--vocab-size", "300", "--out", str(folder / "x"), "--quiet"]
        assert cli.main(["data", "train-tokenizer", str(folder / name), *out]) == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"q": None, "a": "x"}, "line 41: expected field 'q' to be text, got null: leave the row out"),
        ({"q": 7}, "line 41: expected field 'q' to be text, got 7 (int)"),
        (["q"], "line 41: expected a JSON object, got b'["),
    ],
)
def test_a_row_without_a_text_is_named(
    folder: Path, line: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(one) + "\n" for one in [*LINES, line]).encode())
    )
    assert train(folder, "--field", "q") == 2
    assert message in capsys.readouterr().err and not (folder / "bpe").exists()


@pytest.mark.parametrize("word", ["ab", " ", "!?"])
def test_a_word_of_megabytes_takes_seconds(folder: Path, word: str) -> None:
    """Undivided, the time of a merge grows with the square of a word: 6 s for 100,000 letters, a minute for these."""
    (folder / "b.txt").write_text("Many apples " + word * (300_000 // len(word)))
    began = time.process_time()
    assert train(folder, "--field", "q") == 0
    assert time.process_time() - began < 20
