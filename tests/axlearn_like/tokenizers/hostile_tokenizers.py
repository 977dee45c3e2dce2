"""Tokenizers whose files would take all time or memory, or end the stack, for `tests.measured`."""

import gzip
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from tests.measured import Cases

EXPRESSION = "(a+)+$"
TEXT = "a" * 40 + "b"


def spec(**fields: Any) -> dict[str, Any]:
    """Return a tokenizer.json of four words."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2}, "unk_token": "a"},
        **fields,
    }


def write(folder: Path, settings: Any = None, **fields: Any) -> Path:
    """Write a tokenizer's directory."""
    (folder / "tokenizer.json").write_text(json.dumps(spec(**fields)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **(settings or {})}))
    return folder


def split(expression: str) -> dict[str, Any]:
    """Return a field `pre_tokenizer`."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def prepare() -> None:
    """Import what cases are not charged for."""
    import tokenizers

    del tokenizers


def _build(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.Config(path=str(folder)).build()


def _put(name: str, put: Callable[[Path], object], folder: Path) -> None:
    write(folder)
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    _build(folder)


def _given(folder: Path, **fields: Any) -> None:
    _build(write(folder, **fields)).encode(TEXT)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _of_zeros(path: Path) -> None:
    path.parent.joinpath("tokenizer.json").unlink()
    with gzip.open(path, "wb", compresslevel=1) as file:  # compression counts as time, too
        for _ in range(64):
            file.write(bytes(1 << 20))


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(10**10)


_AROUND: dict[str, Any] = {
    "type": "TemplateProcessing",
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}
_DEEP = "[" * 100_000
_LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
CASES: Cases = {
    **{
        f"{name} is deep": partial(_put, name, _text(text))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
        for text in ('{"model": ' + _DEEP,)
    },
    "tokenizer.json is as deep as JSON may be": partial(
        _put, "tokenizer.json", _text('{"model": ' + "[" * 5000 + "]" * 5000 + "}")
    ),
    "tokenizer.json is sparse": partial(_put, "tokenizer.json", _sparse),
    "tokenizer.json is a pipe": partial(_put, "tokenizer.json", os.mkfifo),
    "tokenizer.json is a link to a device": partial(_put, "tokenizer.json", lambda path: path.symlink_to("/dev/zero")),
    "tokenizer.json.gz is zeros": partial(_put, "tokenizer.json.gz", _of_zeros),
    "an end that is no number": partial(_put, "generation_config.json", _text('{"eos_token_id": NaN}')),
    "an infinite end": partial(_put, "generation_config.json", _text('{"eos_token_id": [1, Infinity]}')),
    "an end of 4,000 digits": partial(_put, "generation_config.json", _text('{"eos_token_id": ' + "9" * 4000 + "}")),
    "an end in lists": partial(_put, "generation_config.json", _text('{"eos_token_id": [[1]]}')),
    "an end in an object": partial(_put, "generation_config.json", _text('{"eos_token_id": {"a": 1}}')),
    "an end of a model": partial(_put, "config.json", _text('{"eos_token_id": NaN}')),
    "an id that is no number": partial(_given, model={"type": "WordLevel", "vocab": {"a": math.nan}, "unk_token": "a"}),
    "a huge id": partial(_given, model={"type": "WordLevel", "vocab": {"a": 2**40}, "unk_token": "a"}),
    "a model that is a number": partial(_given, model=3),
    "added tokens that are numbers": partial(_given, added_tokens=[1, 2]),
    "listed tokens without numbers": partial(_given, settings={"added_tokens_decoder": {"x": {"content": "y"}}}),
    "listed tokens without content": partial(_given, settings={"added_tokens_decoder": {"3": {}}}),
    "listed tokens in a list": partial(_given, settings={"added_tokens_decoder": [1]}),
    "listed tokens of 5,000 digits": partial(_given, settings={"added_tokens_decoder": {"9" * 5000: {"content": "y"}}}),
    "an expression without end": partial(_given, pre_tokenizer=split(EXPRESSION)),
    "another": partial(_given, pre_tokenizer=split("(a|a)*$")),
    "one that splits at every a": partial(_given, pre_tokenizer=split("(.*a){20}$")),
    "one of a normalizer": partial(
        _given, normalizer={"type": "Replace", "pattern": {"Regex": EXPRESSION}, "content": "x"}
    ),
    # Panics of the library, at the start or with the first text (huggingface/tokenizers#2094, #2151).
    "characters that cannot be read": partial(
        _given, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "a token around texts that is nowhere": partial(
        _given, post_processor={**_AROUND, "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, *_AROUND["pair"]]}
    ),
    "pieces of no length": partial(_given, pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a merge beyond the longest token": partial(
        _given, model={"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "</s>": 3}, "merges": [["ab", "ab"]]}
    ),
    "an unknown token that is nowhere": partial(
        _given, model={"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "[X]"}
    ),
    "no expression": partial(_given, pre_tokenizer=split("(")),
    "a long text before each": partial(_given, normalizer={"type": "Prepend", "prepend": "x" * 10**7}),
    "replacements of replacements": partial(_given, normalizer={"type": "Sequence", "normalizers": [_LONGER] * 9}),
    "nested sequences": partial(
        _given,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [_LONGER] * 3}] * 3},
    ),
    "a template that cannot be compiled": partial(_given, settings={"chat_template": "{{ " + "(" * 5000}),
}
