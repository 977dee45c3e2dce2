"""The cache: made once, whole or not at all, and never believed when it is damaged."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from axlearn_like.config import ConfigBase
from axlearn_like.input import InputError, JsonLines, SupervisedInput
from axlearn_like.input.encoding import Document
from axlearn_like.tokenizers.bytes import ByteTokenizer
from tests.axlearn_like.input.data import BYTES, json_lines, texts
from tests.axlearn_like.tiny import ROOT

SAID = [f"text {i} " + "x" * (i % 7) for i in range(50)]


class SlowTokenizer(ByteTokenizer):
    """A tokenizer that needs a while for each text, and logs each one that it has encoded."""

    class Config(ByteTokenizer.Config):
        log: str = ""
        seconds: float = 0.0

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg

    def encode(self, text: str) -> list[int]:
        time.sleep(self._cfg.seconds)
        with open(self._cfg.log, "a") as file:
            file.write(".")
        return super().encode(text)


class Wide(ByteTokenizer):
    """A tokenizer whose ids are the last of the vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [self.vocab_size - 1 - ord(c) for c in text]


def source(tmp_path: Path, tokenizer: ConfigBase = BYTES, name: str = "a") -> JsonLines.Config:
    path = tmp_path / f"{name}.jsonl"
    if not path.exists():
        json_lines(path, *({"text": text} for text in SAID))
    return JsonLines.Config(files=str(path), tokenizer=tokenizer, cache=str(tmp_path / "cache"))


def folders(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def slow(tmp_path: Path, seconds: float = 0.0) -> SlowTokenizer.Config:
    return SlowTokenizer.Config(log=str(tmp_path / "log"), seconds=seconds)


def build_in_process(tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.axlearn_like.input.test_token_cache import slow, source, texts\n"
        "path = Path(sys.argv[1]); print(len(texts(source(path, slow(path, float(sys.argv[2]))).build())))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_file_is_tokenised_once_and_told(tmp_path, capsys):
    cfg = source(tmp_path, slow(tmp_path))
    assert texts(cfg.build()) == SAID
    assert "tokenised" in (said := capsys.readouterr().err) and "a.jsonl" in said
    written = (tmp_path / "log").read_text()
    assert texts(cfg.build()) == SAID
    assert (tmp_path / "log").read_text() == written
    assert capsys.readouterr().err == ""


def test_a_text_with_nothing_to_predict_is_left_out_counted_and_told_each_time(tmp_path, capsys):
    """Empty texts without bos; they would end a run of millions of others."""
    json_lines(tmp_path / "a.jsonl", *({"text": text} for text in ("", *SAID, "")))
    cfg = source(tmp_path)
    cfg.example = Document.Config(bos=False)
    for _ in range(2):
        made = cfg.build()
        assert len(made) == len(SAID) and texts(made) == SAID
        said = capsys.readouterr().err
        assert "warning: 2 of 52 records have fewer than two tokens and are left out, such as " in said
        assert "a.jsonl, line 1\n" in said
    cfg.example = Document.Config(bos=True)
    assert len(cfg.build()) == 52 and "warning" not in capsys.readouterr().err


def test_content_tokenizer_and_options_decide_and_the_name_does_not(tmp_path):
    first = source(tmp_path).build()
    moved = source(tmp_path, name="b").build()  # the same content
    assert len(folders(tmp_path)) == 1 and moved.digest == first.digest
    others = [
        source(tmp_path, ByteTokenizer.Config(vocab_size=300)).build(),
        source(tmp_path).set(example=Document.Config(bos=False)).build(),
    ]
    json_lines(tmp_path / "a.jsonl", {"text": "changed"})
    others.append(source(tmp_path).build())
    assert texts(others[-1]) == ["changed"]
    assert len({first.digest, *(other.digest for other in others)}) == 4 == len(folders(tmp_path))


def test_a_run_does_not_go_on_with_data_that_changed(tmp_path):
    cfg = SupervisedInput.Config(source=source(tmp_path), seq_len=40, batch_size=2)
    data = cfg.build()
    next(data)
    json_lines(tmp_path / "a.jsonl", *({"text": text} for text in SAID[::-1]))
    with pytest.raises(InputError, match="data of JsonLines was '[0-9a-f]+' and is"):
        cfg.build().restore(data.state())


@pytest.mark.parametrize("what", ["tokens.bin", "offsets.npy", "learned.npy", "checks.npy", "meta.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "flipped"])
def test_what_is_damaged_is_made_again(tmp_path, capsys, what, how):
    cfg = source(tmp_path)
    cfg.build()
    (folder,) = folders(tmp_path)
    data = bytearray((folder / what).read_bytes())
    if how == "flipped":
        data[-9] ^= 64
    (folder / what).write_bytes(data[:-10] if how == "cut" else data)
    if how == "gone":
        (folder / what).unlink()
    again = cfg.build()
    if (what, how) == ("tokens.bin", "flipped"):  # found when it is read: checking all at the start would take long
        with pytest.raises(InputError, match=f"a.jsonl is damaged at example 49; move {folder} away"):
            texts(again)
    else:
        assert texts(again) == SAID
        assert "are damaged; tokenising again" in capsys.readouterr().err
        capsys.readouterr()
        cfg.build()
        assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_killed_in_the_middle_and_made_again(tmp_path):
    source(tmp_path)
    (tmp_path / "log").touch()
    child = build_in_process(tmp_path, 0.05)
    while (tmp_path / "log").stat().st_size < 10:
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    (left,) = folders(tmp_path)
    assert not (left / "meta.json").exists()
    assert texts(source(tmp_path, slow(tmp_path, 0.05)).build()) == SAID
    (made,) = folders(tmp_path)
    assert made != left


@pytest.mark.full  # test_killed_in_the_middle_and_made_again has processes too
def test_processes_share_the_work(tmp_path):
    source(tmp_path)
    children = [build_in_process(tmp_path, 0.02) for _ in range(2)]
    results = [child.communicate(timeout=120) for child in children]
    assert [out.strip() for out, _ in results] == ["50"] * 2, results
    # Each text once, and in each process the first one more: whether it can be read is seen before the work begins.
    assert 50 < len((tmp_path / "log").read_text()) <= 52
    assert len(folders(tmp_path)) == 1


def test_wide_vocabularies(tmp_path):
    for vocab_size in (65_536, 65_537, 200_000):
        built = source(tmp_path, Wide.Config(vocab_size=vocab_size)).build()
        expected = [256, *(vocab_size - 1 - ord(c) for c in SAID[3]), 257]
        assert built[3]["tokens"].tolist() == expected and built[3]["tokens"].dtype == np.int32


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot make the folder .*file/x for tokenised data: Not a directory"):
        source(tmp_path).set(cache=str(tmp_path / "file" / "x")).build()
