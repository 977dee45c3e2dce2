"""Encodings: how a record of a file becomes tokens, and which of them are learned."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.source import InputError
from axlearn_like.tokenizers.inside import encode_inside
from axlearn_like.tokenizers.protocol import Tokenizer, begin
from mesh.errors import did_you_mean

Encoded = tuple[Sequence[int] | np.ndarray, Sequence[bool] | np.ndarray]  # tokens [n], loss mask [n]


class Encoding(Protocol):
    """A way to make an example of a record. Built by `config.build(tokenizer=...)`."""

    fields: tuple[str, ...]  # the fields of a record that are read

    def encode(self, record: Mapping[str, Any], where: str) -> Encoded:
        """Return tokens and loss mask of a record.

        Raises:
            InputError: a field is missing or has another type; the message has `where`.
        """
        ...


class Document(Configurable):
    """A text: bos, the text, eos; all of it is learned."""

    class Config(ConfigBase["Document"]):
        text: str = "text"  # field
        bos: bool = True
        eos: bool = True

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        self._tokenizer = required_tokenizer(tokenizer, cfg)
        self.fields = (cfg.text,)
        self._before = begin(self._tokenizer) if cfg.bos else []
        self._after = [self._tokenizer.eos] if cfg.eos else []

    def encode(self, record: Mapping[str, Any], where: str) -> Encoded:
        """Return tokens and loss mask, see `Encoding.encode`."""
        ids = [*self._before, *self._tokenizer.encode(text_of(record, self.fields[0], where)), *self._after]
        return ids, np.ones(len(ids), bool)


class PromptAnswer(Configurable):
    """A prompt and its answer: bos, prompt, separator, answer, eos; the answer and eos are learned, or all of it."""

    class Config(ConfigBase["PromptAnswer"]):
        prompt: str = "prompt"  # field
        answer: str = "answer"  # field
        separator: str = "\n"
        learn: Literal["answer", "all"] = "answer"

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        self._tokenizer = required_tokenizer(tokenizer, cfg)
        self.fields = (cfg.prompt, cfg.answer)
        self._separator, self._learn_all = cfg.separator, cfg.learn == "all"

    def encode(self, record: Mapping[str, Any], where: str) -> Encoded:
        """Return tokens and loss mask, see `Encoding.encode`."""
        prompt, answer = (text_of(record, field, where) for field in self.fields)
        given = [*begin(self._tokenizer), *self._tokenizer.encode(prompt + self._separator)]
        learned = [*encode_inside(self._tokenizer, answer, given), self._tokenizer.eos]
        return given + learned, np.arange(len(given) + len(learned)) >= (0 if self._learn_all else len(given))


class TokenIds(Configurable):
    """Token ids made elsewhere: a list of integers, and optionally one of which are learned."""

    class Config(ConfigBase["TokenIds"]):
        tokens: str = "tokens"  # field
        loss_mask: str | None = None  # field; None: all tokens are learned

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        self._vocab_size = tokenizer.vocab_size if tokenizer else 2**31
        self.fields = (cfg.tokens,) + ((cfg.loss_mask,) if cfg.loss_mask else ())

    def encode(self, record: Mapping[str, Any], where: str) -> Encoded:
        """Return tokens and loss mask, see `Encoding.encode`."""
        ids = np.asarray(field_of(record, self.fields[0], where))
        if ids.ndim != 1 or not (ids.dtype.kind in "iu" or not len(ids)):
            raise InputError(f"{where}: expected {self.fields[0]!r} to be a list of integers, got {str(ids)[:60]}")
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise InputError(
                f"{where}: {self.fields[0]!r} has token ids from {ids.min()} to {ids.max()}; "
                f"expected 0..{self._vocab_size - 1}"
            )
        if len(self.fields) == 1:
            return ids, np.ones(len(ids), bool)
        return ids, np.asarray(field_of(record, self.fields[1], where)).astype(bool)


def field_of(record: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a field of a record: by its name, or by names with dots between them of nested objects and lists.

    `reward_model.ground_truth` is a field within a field, `messages.-1.content` that of the last element. A nested
    object may be its JSON text.

    Raises:
        InputError: there is none; with the nearest names.
    """
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.removeprefix("-").isdecimal() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            known = map(str, value) if isinstance(value, Mapping) else ()
            raise InputError(f"{where}: there is no field {name!r}{did_you_mean(part, known)}")
    return value


def find_field(record: Mapping[str, Any], name: str) -> Any:
    """Return a field of a record as `field_of`; None: there is none."""
    try:
        return field_of(record, name, "")
    except InputError:
        return None


def text_of(record: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that is text, or fields that are, `a+b`: each on a line of its own, without empty ones.

    Raises:
        InputError: a field is missing, or none.
    """
    if "+" in name and name not in record:
        parts = [part for part in name.split("+") if field_of(record, part, where) not in (None, "")]
        return "\n".join(text_of(record, part, where) for part in parts)
    value = field_of(record, name, where)
    if isinstance(value, bytes):
        value = decode_utf8(value, f"{where}, field {name!r}")
    if value is None:
        raise InputError(f"{where}: expected field {name!r} to be text, got null: leave the row out, or name another")
    if not isinstance(value, str):
        raise InputError(f"{where}: expected field {name!r} to be text, got {value!r:.60} ({type(value).__name__})")
    return value


def columns_of(fields: Iterable[str], columns: Iterable[str]) -> list[str]:
    """Return the columns that hold these fields, named as `field_of` and `text_of` take them, in order."""
    known, names = set(columns), dict[str, None]()
    for field in fields:
        for part in [field] if field in known else field.split("+"):
            names[part if part in known else part.split(".")[0]] = None
    return list(names)


def decode_utf8(data: bytes, where: str) -> str:
    """Return the text; InputError, with `where` and the byte, unless it is UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; convert it, e.g. with iconv"
        ) from None


def parse_json(text: str, where: str) -> Any:
    """Return what a JSON text says.

    Raises:
        InputError: a string holds half of a surrogate pair, which no tokenizer and no file takes. As `json.loads`.
    """
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise InputError(
                f"{where}: a text holds \\u{half:04x}, half of a surrogate pair; repair what wrote the file"
            ) from None
    return value


def required_tokenizer(tokenizer: Tokenizer | None, cfg: ConfigBase[Any]) -> Tokenizer:
    """Return the tokenizer; InputError, with the config's name, if there is none."""
    if tokenizer is None:
        raise InputError(f"{type(cfg).__qualname__} reads text: the source needs a tokenizer")
    return tokenizer
