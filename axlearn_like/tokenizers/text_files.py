"""Texts of files as they are, without tokens: plain text and fields of JSON lines, compressed by gzip or not."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.input.encoding import decode_utf8
from axlearn_like.input.line_formats import read_lines
from axlearn_like.input.source import InputError
from mesh.errors import did_you_mean

FORMATS = (".txt", ".jsonl")


def text_format(path: Path) -> str:
    """Return which of `FORMATS` a file's name says.

    Raises:
        InputError: none, or there is no such file.
    """
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise InputError(f"no file {path}{near}")
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in FORMATS:
        raise InputError(f"{path}: expected a file whose name ends with {' or '.join(FORMATS)}, and perhaps .gz")
    return kind


def read_texts(
    paths: Sequence[Path], fields: Sequence[str] = (), on_bytes: Callable[[int], None] = lambda count: None
) -> Iterator[str]:
    """Yield the texts of files in their order: a line of a plain one, and of JSON lines the fields of each object.

    Args:
        paths: .txt or .jsonl, or either with .gz.
        fields: fields of each JSON object; there must be at least one if a file is of JSON lines.
        on_bytes: gets the number of bytes read since the last call, decompressed.

    Raises:
        InputError: a file that is not there or damaged, or a line without such a field; the message has the line.
    """
    for path in paths:  # a mistake in the last one should not be found hours later
        if text_format(path) == ".jsonl" and not fields:
            raise InputError(f"{path} has JSON lines: name the field that holds the text (--field)")
    for path in paths:
        whole = text_format(path) == ".txt"
        for number, line, _ in read_lines(path):
            on_bytes(len(line))
            where = f"{path}, line {number}"
            text = decode_utf8(line, where)
            if whole:
                yield text
            elif text.strip():
                yield from _fields(text, fields, where)


def _fields(line: str, fields: Sequence[str], where: str) -> Iterator[str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    for name in fields:
        value = record.get(name) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise InputError(f"{where}: {_fault(record, name)}")
        yield value


def _fault(record: Any, name: str) -> str:
    if not isinstance(record, dict):
        return f"expected an object with a field {name!r}, got {record!r:.60}"
    if name not in record:
        return f"there is no field {name!r}{did_you_mean(name, map(str, record))}"
    value = record[name]
    got = "null" if value is None else f"{value!r:.60} ({type(value).__name__})"
    return f"field {name!r} is {got}; expected text: leave the row out, or name other fields"
