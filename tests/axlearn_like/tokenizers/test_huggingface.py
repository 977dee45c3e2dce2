"""Tokenizers of directories: ids as the library's, text without loss, special tokens and ends as the files say."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axlearn_like.tokenizers.files import copy_tokenizer, is_tokenizer, read_files
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.protocol import TokenizerError, answer_text, begin, completion_text
from tests.axlearn_like.tokenizers.golden_files import FOLDER, rendered, tokenizer

WORD_PIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
BOTH = ("byte_level", "byte_fallback")
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab €🙂\n <s>|", max_size=30)


@pytest.fixture(scope="session")
def gpt2(shared_data: Path) -> HuggingFaceTokenizer:
    """The published vocabulary of GPT-2, from its pair of files."""
    return HuggingFaceTokenizer.Config(path=str(shared_data / "gpt2-bpe")).build()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the byte-level directory, to be changed."""
    return Path(shutil.copytree(FOLDER / "byte_level", tmp_path / "model"))


def write(directory: Path, name: str, **fields: Any) -> None:
    path = directory / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **fields}))


def build(directory: Path, **fields: Any) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.Config(path=str(directory), **fields).build()


@pytest.mark.parametrize("name", BOTH)
def test_ids_are_those_of_transformers_with_split_special_tokens(name: str) -> None:
    for text, ids in rendered()[f"{name} | encode"]:
        assert tokenizer(name).encode(text) == ids


@pytest.mark.parametrize("name", BOTH)
@given(text=TEXTS)
def test_a_text_survives(name: str, text: str) -> None:
    built = tokenizer(name)
    assert built.decode(built.encode(text)) == text


@pytest.mark.slow
@given(text=TEXTS)
def test_a_text_survives_gpt2(gpt2: HuggingFaceTokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode(text)) == completion_text(gpt2, gpt2.encode(text)) == text


@pytest.mark.slow
def test_gpt2_is_the_published_one(gpt2: HuggingFaceTokenizer) -> None:
    """Ids as in OpenAI's repository of it."""
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode("<|endoftext|>", special=True) == [50256]
    assert (gpt2.vocab_size, gpt2.eos, gpt2.stop_ids, gpt2.bos, gpt2.pad) == (50257, 50256, (50256,), None, None)
    assert gpt2.decode([15496, 50256, 995]) == "Hello world" and begin(gpt2) == []


@pytest.mark.parametrize("name", BOTH)
@given(ids=st.lists(st.integers(0, 300), max_size=20), more=st.lists(st.integers(0, 300), max_size=8))
def test_more_tokens_only_lengthen_the_text(name: str, ids: list[int], more: list[int]) -> None:
    built = tokenizer(name)
    text = completion_text(built, ids).rstrip("\ufffd")
    assert completion_text(built, [*ids, *more]).startswith(text)


@pytest.mark.parametrize("name", BOTH)
def test_a_special_token_in_a_text_is_text_unless_it_is_a_templates(name: str) -> None:
    built = tokenizer(name)
    turn = built.token_id("<|turn_end|>")
    assert turn not in built.encode("a<|turn_end|>b") and turn in built.encode("a<|turn_end|>b", special=True)
    assert built.decode(built.encode("a<|turn_end|>b")) == "a<|turn_end|>b"
    assert turn is not None and built.token_bytes(turn) == b""
    inside = [*built.encode("a"), turn, *built.encode("b")]
    assert "<|turn_end|>" in answer_text(built, inside) and "<|turn_end|>" not in completion_text(built, inside)
    think = built.token_id("<think>")  # added, but not special: it is text, and one token
    assert think in built.encode("<think>") and built.decode([think or 0]) == "<think>"


def test_a_blank_before_a_text_is_the_tokenizers_but_a_completion_keeps_its_own() -> None:
    built = tokenizer("byte_fallback")
    ids = built.encode("the")
    assert built.decode(ids) == "the" and completion_text(built, ids) == " the"
    assert built.bos == built.token_id("<s>") and begin(built) == [built.bos]


def test_ends_and_the_beginning_are_as_the_files_say(directory: Path) -> None:
    assert build(directory).stop_ids == (build(directory).token_id("</s>"),) and build(directory).bos is None
    call = build(directory).token_id("<|call_end|>")
    write(directory, "generation_config.json", eos_token_id=[call, build(directory).eos])
    assert build(directory).stop_ids == (build(directory).eos, call)
    write(directory, "tokenizer_config.json", add_bos_token=True)
    assert build(directory).bos == build(directory).token_id("<s>")
    assert build(directory, bos_token="").bos is None
    assert build(directory, bos_token="<|start|>").bos == build(directory).token_id("<|start|>")
    assert build(directory, eos_token="<|sep|>").eos == build(directory).token_id("<|sep|>")
    write(directory, "special_tokens_map.json", eos_token={"content": "<|turn_end|>", "lstrip": False})
    assert build(directory).eos == build(directory).token_id("</s>")  # tokenizer_config.json goes first


@pytest.mark.parametrize(
    ("model", "generation", "ends"),
    [
        ({"eos_token_id": [3, 4]}, None, (3, 4)),  # transformers' `from_model_config`, vLLM without the other file
        ({"eos_token_id": 4}, None, (4,)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [3]}}, None, (3,)),
        ({"eos_token_id": [4], "text_config": {"eos_token_id": [3]}}, None, (4,)),
        ({"text_config": {}}, None, ()),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, (5,)),  # where it is there, it alone counts
        ({"eos_token_id": [3, 4]}, {"temperature": 1.0}, ()),
    ],
)
def test_ends_stand_where_vllm_takes_them(directory: Path, model: Any, generation: Any, ends: tuple[int, ...]) -> None:
    before = build(directory)
    write(directory, "config.json", **model)
    if generation is not None:
        write(directory, "generation_config.json", **generation)
    built = build(directory)
    assert built.stop_ids == (before.eos, *ends) and built.eos == before.eos
    assert (built.digest == before.digest) == (built.stop_ids == before.stop_ids)
    copy_tokenizer(directory, directory.parent)
    assert not (directory.parent / "config.json").exists()


def test_the_end_of_the_templates_turn_ends_completions(directory: Path) -> None:
    """ChatML on a base model, whose files know the end of a text alone (modelscope/ms-swift#3113)."""
    base = build(directory, chat_template="")
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|turn_end|>\n{% endfor %}")
    turn = base.token_id("<|turn_end|>")
    assert build(directory).stop_ids == (*base.stop_ids, turn) and turn not in base.stop_ids
    (directory / "chat_template.jinja").write_text("{{ raise_exception('none') }}")
    assert build(directory).stop_ids == base.stop_ids


@pytest.mark.parametrize(("pad", "kept"), [("</s>", False), ("<s>", True), ("<unk>", True), ("gone", False)])
def test_a_pad_that_ends_texts_is_none(directory: Path, pad: str, kept: bool) -> None:
    write(directory, "tokenizer_config.json", pad_token=pad)
    built = build(directory)
    assert built.pad == (built.token_id(pad) if kept else None)


def test_rows_of_the_embedding_beyond_the_tokens_have_no_text(directory: Path) -> None:
    ids = build(directory).vocab_size
    built = build(directory, vocab_size=512)
    assert built.vocab_size == 512 and built.decode([511]) == "" and built.token_bytes(10**6) == b""
    with pytest.raises(TokenizerError, match=r"outside this tokenizer's 0\.\.511"):
        built.decode([512])
    with pytest.raises(TokenizerError, match=f"vocab_size=100, but .* has ids up to {ids - 1}"):
        build(directory, vocab_size=100)


def test_the_digest_is_of_the_content(directory: Path, tmp_path: Path) -> None:
    digest = build(directory).digest
    moved = shutil.copytree(directory, tmp_path / "elsewhere")
    assert build(moved).digest == build(moved / "tokenizer.json").digest == digest
    write(moved, "generation_config.json", temperature=0.5)
    assert build(moved).digest == digest
    others = {build(moved, eos_token="<s>").digest, build(moved, vocab_size=512).digest}
    write(moved, "tokenizer_config.json", add_bos_token=True)
    others.add(build(moved).digest)
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    others.add(build(moved).digest)
    write(moved, "generation_config.json", eos_token_id=[3])
    others.add(build(moved).digest)
    assert len(others | {digest}) == 6


@pytest.mark.slow
def test_a_copy_is_what_transformers_reads(gpt2: HuggingFaceTokenizer, shared_data: Path, tmp_path: Path) -> None:
    """Files of a pair become a tokenizer.json."""
    for source, name in ((shared_data / "gpt2-bpe", "pair"), (FOLDER / "byte_level", "whole")):
        (tmp_path / name).mkdir()
        copy_tokenizer(source, tmp_path / name)
    assert (tmp_path / "whole" / "tokenizer.json").read_bytes() == (FOLDER / "byte_level/tokenizer.json").read_bytes()
    assert build(tmp_path / "whole").encode("Hello é") == tokenizer("byte_level").encode("Hello é")
    text = "Grüße, 世界 <|endoftext|> it's 1234"
    assert build(tmp_path / "pair").encode(text) == gpt2.encode(text) and build(tmp_path / "pair").eos == gpt2.eos


def test_a_pair_of_files_compressed_or_not_is_the_same(shared_data: Path, tmp_path: Path) -> None:
    for source, name in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        data = gzip.decompress((shared_data / "gpt2-bpe" / f"{source}.gz").read_bytes())
        (tmp_path / name).write_bytes(data)
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / f"{name}.gz").write_bytes(gzip.compress(data))
    assert is_tokenizer(tmp_path) and not is_tokenizer(tmp_path.parent)
    digests = {read_files(place).digest for place in (tmp_path, tmp_path / "c", tmp_path / "vocab.json")}
    assert len(digests) == 1
    write(tmp_path, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    with pytest.raises(TokenizerError, match="tokenizer_class is 'Qwen2Tokenizer', which splits text in a way"):
        read_files(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match="only one of vocab.json and merges.txt"):
        read_files(tmp_path)


def broken_id(directory: Path) -> None:
    listed = {"7": {"content": "<s>", "special": True}}
    write(directory, "tokenizer_config.json", added_tokens_decoder=listed)


def no_end(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "</s>"]
    (directory / "tokenizer.json").write_text(json.dumps(spec))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: write(d, "tokenizer.json", model={"type": "BPE"}), "no tokenizer that the library"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer.json is not JSON: .* at line 1, column 2"),
        (lambda d: (d / "tokenizer.json").write_bytes(b'{"\xff"}'), "tokenizer.json is not UTF-8 at byte 2"),
        (lambda d: (d / "tokenizer.json").write_text("[]"), "expected a JSON object, got list"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "an object with a field 'model'"),
        (lambda d: write(d, "tokenizer.json", decoder={"type": "Fuse2"}), "no tokenizer that the library"),
        (lambda d: write(d, "tokenizer.json", decoder=WORD_PIECE), "its decoder has 'WordPiece', whose text depends"),
        (lambda d: write(d, "tokenizer.json", decoder=None), "its decoder has None"),
        (lambda d: write(d, "tokenizer_config.json", eos_token="<end>"), "no token '<end>', which is said to end"),
        (lambda d: write(d, "generation_config.json", eos_token_id=[3, 999]), "eos_token_id 999, but ids end at"),
        (lambda d: write(d, "config.json", eos_token_id=[3, 999]), "config.json: eos_token_id 999, but ids end at"),
        (lambda d: write(d, "config.json", eos_token_id="</s>"), "config.json: eos_token_id '</s>', but ids end at"),
        (broken_id, r"tokenizer_config.json gives '<s>' the id 7, but in tokenizer.json it is \d+"),
        (no_end, 'no file beside it names the token that ends a text; set eos_token'),
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer: expected tokenizer.json, or vocab.json"),
        (shutil.rmtree, "model does not exist: expected a directory or a tokenizer.json here"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused(directory: Path, change: Any, message: str) -> None:
    change(directory)
    with pytest.raises(TokenizerError, match=message):
        build(directory)


def test_a_name_of_a_hub_is_a_directory_here() -> None:
    with pytest.raises(TokenizerError, match=re.escape("some-org/some-model does not exist: expected a directory")):
        HuggingFaceTokenizer.Config(path="some-org/some-model").build()
