"""Files: what is written is read in each format, and what cannot be read is refused by name before it costs time."""

import codecs
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from axlearn_like.input import (
    ArrayRecord,
    InputError,
    JsonLines,
    Parquet,
    PlainText,
    PromptAnswer,
    SupervisedInput,
    TokenIds,
    json_record,
    text_record,
)
from axlearn_like.input.encoding import Document
from axlearn_like.input.line_formats import read_json_lines
from mesh.errors import UserError
from tests.axlearn_like.input.data import BYTES, json_lines, texts

SAID = ["one", "zwei – drei", "", "a longer text, of more than one row"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "axlearn-like" / "tokens"


def array_record(path: Path, *records: bytes) -> str:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def tf_example(**features: bytes | list[int]) -> bytes:
    """A tf.train.Example byte by byte, from the encoding that protobuf documents."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        else:
            feature = field(3, field(1, b"".join(map(varint, value))))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def test_json_lines(tmp_path):
    json_lines(tmp_path / "a.jsonl", *({"text": text, "other": 3} for text in SAID[:2]))
    json_lines(tmp_path / "b.jsonl", *({"text": text} for text in SAID[2:]))
    source = JsonLines.Config(files=str(tmp_path / "*.jsonl"), tokenizer=BYTES).build()
    assert texts(source) == SAID
    example = source[0]
    assert example["tokens"].tolist() == [256, *b"one", 257]
    assert example["loss_mask"].tolist() == [True] * 5
    assert source.longest == (len(SAID[3].encode()) + 2, f"example 1 of {tmp_path / 'b.jsonl'}")
    with pytest.raises(IndexError):
        source[4]


def test_plain_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n\none\ntwo\r\nthree\n\n \nfour\n")
    (tmp_path / "b.txt").write_bytes(b"five\n\nsix")
    cfg = PlainText.Config(files=str(tmp_path / "?.txt"), tokenizer=BYTES)
    assert texts(cfg.build()) == ["one\ntwo\nthree", "four", "five", "six"]
    whole = cfg.clone(document="file").build()
    assert texts(whole) == ["\n\none\ntwo\nthree\n\n \nfour\n", "five\n\nsix"]
    bare = cfg.clone(example=Document.Config(bos=False, eos=False)).build()
    assert bare[1]["tokens"].tolist() == list(b"four")


def test_array_record(tmp_path):
    cfg = ArrayRecord.Config(files="", tokenizer=BYTES)
    plain = array_record(tmp_path / "plain", *(text.encode() for text in SAID))
    assert texts(cfg.clone(files=plain, decode=text_record).build()) == SAID
    as_json = array_record(tmp_path / "json", *(json.dumps({"text": text}).encode() for text in SAID))
    assert texts(cfg.clone(files=as_json, decode=json_record).build()) == SAID
    ids = [[1, 300, 70_000], [5, 6]]
    examples = array_record(tmp_path / "tf", *(tf_example(text=text.encode(), ids=ids[0]) for text in SAID))
    assert texts(cfg.clone(files=examples).build()) == SAID
    source = cfg.clone(files=examples, tokenizer=None, example=TokenIds.Config(tokens="ids")).build()
    assert source[0]["tokens"].tolist() == ids[0]


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    ids = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3, 5]]
    pq.write_table(pa.table({"text": SAID, "ids": ids}), tmp_path / "a.parquet", row_group_size=2)
    cfg = Parquet.Config(files=str(tmp_path / "*.parquet"), tokenizer=BYTES)
    assert texts(cfg.build()) == SAID
    source = cfg.clone(example=TokenIds.Config(tokens="ids")).build()
    assert [source[i]["tokens"].tolist() for i in range(4)] == ids
    with pytest.raises(InputError, match=r"a.parquet: there is no column 'txt'; did you mean 'text'\?"):
        cfg.clone(example=Document.Config(text="txt")).build()
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(InputError, match="b.parquet is not a Parquet file"):
        cfg.build()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="b.parquet has no rows"):
        cfg.build()


def test_parquet_without_pyarrow_names_the_extra(tmp_path):
    try:
        import pyarrow  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        (tmp_path / "a.parquet").write_text("x")
        with pytest.raises(InputError, match=r"pip install .*\[data\]"):
            Parquet.Config(files=str(tmp_path / "a.parquet"), tokenizer=BYTES).build()
    else:
        pytest.skip("pyarrow is installed")


def test_prompts_are_not_learned(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", {"q": "1+1?", "a": "2"}, {"q": "", "a": ""})
    example = PromptAnswer.Config(prompt="q", answer="a")
    source = JsonLines.Config(files=path, tokenizer=BYTES, example=example).build()
    assert source[0]["tokens"].tolist() == [256, *b"1+1?\n2", 257]
    assert source[0]["loss_mask"].tolist() == [False] * 6 + [True] * 2
    assert source[1]["loss_mask"].tolist() == [False] * 2 + [True]


def test_any_loss_mask_is_kept(tmp_path):
    rng = np.random.default_rng(0)
    examples = []
    for length in rng.integers(2, 30, 40):
        mask = rng.random(length) < rng.choice([0, 0.1, 0.5, 1])
        examples.append({"ids": rng.integers(0, 264, length).tolist(), "mask": mask.astype(int).tolist()})
    path = json_lines(tmp_path / "a.jsonl", *examples)
    encoding = TokenIds.Config(tokens="ids", loss_mask="mask")
    source = JsonLines.Config(files=path, tokenizer=BYTES, example=encoding).build()
    index = rng.integers(0, 40, 300)
    stop = np.array([rng.integers(1, len(examples[i]["ids"]) + 1) for i in index])
    start = np.array([rng.integers(0, end) for end in stop])
    learned = source.learned(index, start, stop)
    assert source.lengths(index).tolist() == [len(examples[i]["ids"]) for i in index]
    for i, a, b, count in zip(index.tolist(), start.tolist(), stop.tolist(), learned.tolist(), strict=True):
        tokens, mask = source.read(i, a, b)
        assert tokens.tolist() == examples[i]["ids"][a:b]
        assert mask.astype(int).tolist() == examples[i]["mask"][a:b]
        assert count == mask.sum()


@pytest.mark.numerics
def test_files_train_like_what_they_hold(tmp_path):
    """The whole way: the global batch of two processes is that of one, and the weights add up to 1."""
    json_lines(tmp_path / "a.jsonl", *({"text": "x" * n} for n in range(1, 40)))
    source = JsonLines.Config(files=str(tmp_path / "a.jsonl"), tokenizer=BYTES)
    cfg = SupervisedInput.Config(source=source, seq_len=16, batch_size=4, long="split", seed=2)
    whole, halves = cfg.build(), [cfg.build(rows=rows) for rows in (range(2), range(2, 4))]
    for _ in range(30):
        batch, parts = next(whole), [next(half) for half in halves]
        for name, x in batch.items():
            np.testing.assert_array_equal(x, np.concatenate([part[name] for part in parts]), err_msg=name)
        np.testing.assert_allclose(batch["weights"].sum(), 1, rtol=1e-6)


BAD_LINES = [
    ('{"text": "a"}\n{"txt": "b"}\n', "a.jsonl, line 2: there is no field 'text'; did you mean 'txt'?"),
    ('{"text": 3}\n', "a.jsonl, line 1: expected field 'text' to be text, got 3 (int)"),
    ('{"text": "a"}\n{"text": \n', "a.jsonl, line 2 is not JSON"),
    ("[1, 2]\n", "a.jsonl, line 1: expected a JSON object, got b'[1, 2]'"),
    ("\n\n", "a.jsonl holds no JsonLines record"),
    ("", "a.jsonl is empty"),
    ('{"text": "a"}\n{"text": "b\\ud83d"}\n', "a.jsonl, line 2: a text holds \\ud83d, half of a surrogate pair"),
    (b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl, line 2 is not UTF-8: byte 0xff at offset 10"),
]


@pytest.mark.parametrize(("content", "says"), BAD_LINES)
def test_bad_json_lines_are_refused_by_name(tmp_path, cache, content, says):
    (tmp_path / "a.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=re.escape(says)):
        JsonLines.Config(files=str(tmp_path / "a.jsonl"), tokenizer=BYTES).build()
    assert not [path for path in cache.glob("*") if path.is_dir()]  # nothing half made is left


def test_a_byte_order_mark_is_no_text(tmp_path, cache):
    for name, content in (("a.jsonl", '{"text": "a\\ud83d\\ude00"}\n{"text": "\ufeffb"}\n'), ("a.txt", "one\n\ntwo\n")):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content.encode())
    assert [record["text"] for record, _, _ in read_json_lines(tmp_path / "a.jsonl")] == ["a\U0001f600", "\ufeffb"]
    plain = PlainText.Config(files=str(tmp_path / "a.txt"), tokenizer=BYTES).build()
    assert texts(plain)[0] == "one"


def test_a_mistake_in_the_last_file_is_found_before_the_first_is_tokenised(tmp_path, cache):
    json_lines(tmp_path / "a.jsonl", {"text": "a"})
    json_lines(tmp_path / "b.jsonl", {"txt": "a"})
    with pytest.raises(InputError, match="b.jsonl, line 1: there is no field 'text'"):
        JsonLines.Config(files=str(tmp_path / "*.jsonl"), tokenizer=BYTES).build()
    assert not [path for path in cache.glob("*") if path.is_dir()]


def test_bad_records_are_refused_by_name(tmp_path):
    cfg = ArrayRecord.Config(files=str(tmp_path / "a"), tokenizer=BYTES, decode=text_record)
    (tmp_path / "a").write_text("no records " * 10_000)
    with pytest.raises(InputError, match="a is not a complete ArrayRecord file"):
        cfg.build()
    array_record(tmp_path / "a", b"\xc3\x28")
    with pytest.raises(InputError, match=r"a, record 0, field 'text' is not UTF-8: byte 0xc3 at offset 0"):
        cfg.build()
    with pytest.raises(InputError, match="a, record 0: json_record cannot read it"):
        cfg.clone(decode=json_record).build()
    array_record(tmp_path / "a", tf_example(tekst=b"x"))
    with pytest.raises(InputError, match=r"a, record 0: there is no field 'text'; did you mean 'tekst'\?"):
        ArrayRecord.Config(files=str(tmp_path / "a"), tokenizer=BYTES).build()


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        ([1, 264], [1, 1], "line 1: 'ids' has token ids from 1 to 264; expected 0..263"),
        ([1, -2], [1, 1], "line 1: 'ids' has token ids from -2 to 1"),
        ([1.5, 2], [1, 1], "line 1: expected 'ids' to be a list of integers"),
        ([1, 2, 3], [1, 1], r"line 1: expected tokens and loss_mask of one shape [n] with n >= 2, got (3,) and (2,)"),
        ([1], [1], "line 1: expected two tokens or more, but none of 1 records has them"),
    ],
)
def test_bad_token_ids_are_refused_by_name(tmp_path, ids, mask, says):
    path = json_lines(tmp_path / "a.jsonl", {"ids": ids, "mask": mask})
    encoding = TokenIds.Config(tokens="ids", loss_mask="mask")
    with pytest.raises(InputError, match=re.escape(says)):
        JsonLines.Config(files=path, tokenizer=BYTES, example=encoding).build()


def test_files_that_are_not_there_are_named(tmp_path):
    json_lines(tmp_path / "train.jsonl", {"text": "a"})
    for files, says in [
        (str(tmp_path / "trian.jsonl"), "no file matches .*trian.jsonl; did you mean 'train.jsonl'?"),
        (str(tmp_path.parent / f"{tmp_path.name}x" / "*.jsonl"), "there is no folder .*x; did you mean"),
        ("qs://bucket/*.jsonl", "files='qs://bucket': no library serves qs://"),
        ((), "at least one path or glob"),
        ((str(tmp_path / "*.jsonl"), str(tmp_path / "train.jsonl")), "train.jsonl is matched twice"),
    ]:
        with pytest.raises(UserError, match=says):
            JsonLines.Config(files=files, tokenizer=BYTES).build()
    with pytest.raises(InputError, match="Document.Config reads text: the source needs a tokenizer"):
        JsonLines.Config(files=str(tmp_path / "train.jsonl"), tokenizer=None).build()


def test_a_text_that_does_not_fit_is_refused_at_the_start(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", *({"text": "x" * n} for n in (3, 9, 30)))
    source = JsonLines.Config(files=path, tokenizer=BYTES)
    with pytest.raises(InputError, match=r"example 2 of .*a.jsonl has 32 tokens .* but seq_len is 12"):
        SupervisedInput.Config(source=source, seq_len=12, batch_size=1).build()


def test_compressed_files_hold_the_same_examples(tmp_path, monkeypatch):
    lines = "".join(f'{{"text": "line {i}"}}\n' for i in range(50)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n\nthree\n"))
    monkeypatch.setenv("SOME_DATA", str(tmp_path))
    plain, packed = (
        JsonLines.Config(files=f"$SOME_DATA/{name}", tokenizer=BYTES, cache=str(tmp_path / "cache")).build()
        for name in ("a.jsonl", "b.jsonl.gz")
    )
    assert [plain[i]["tokens"].tolist() for i in range(50)] == [packed[i]["tokens"].tolist() for i in range(50)]
    text = PlainText.Config(files="${SOME_DATA}/c.txt.gz", tokenizer=BYTES, cache=str(tmp_path / "cache")).build()
    assert [BYTES.build().decode(text[i]["tokens"]) for i in range(len(text))] == ["one\ntwo", "three"]
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    with pytest.raises(InputError, match="d.jsonl.gz is a damaged gzip file"):
        JsonLines.Config(files="$SOME_DATA/d.jsonl.gz", tokenizer=BYTES, cache=str(tmp_path / "cache")).build()


def test_files_that_are_not_there_are_named_with_their_origin(tmp_path, monkeypatch):
    monkeypatch.delenv("SOME_DATA", raising=False)
    cfg = JsonLines.Config(files="$SOME_DATA/a.jsonl", tokenizer=BYTES, origin="https://example.org/data")
    with pytest.raises(InputError, match="variable SOME_DATA is not set; it comes from https://example.org/data"):
        cfg.build()
    with pytest.raises(InputError, match="no file matches .*/a.jsonl.*; it comes from https://example.org/data"):
        cfg.clone(files=str(tmp_path / "a.jsonl")).build()


def test_all_of_a_prompt_may_be_learned(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n')
    cfg = JsonLines.Config(files=str(tmp_path / "a.jsonl"), tokenizer=BYTES, example=PromptAnswer.Config())
    assert cfg.build()[0]["loss_mask"].tolist() == [False] * 4 + [True] * 2
    assert cfg.clone(example=PromptAnswer.Config(learn="all")).build()[0]["loss_mask"].all()
