"""Files of lines: JSON lines, and plain text; compressed by gzip if their names end with .gz."""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from axlearn_like.input.encoding import decode_utf8, parse_json
from axlearn_like.input.file_source import FileSource, Record
from axlearn_like.input.source import InputError
from mesh.errors import did_you_mean

FORMATS = (".txt", ".jsonl")  # formats of plain text, each optionally with .gz


def read_lines(path: Path) -> Iterator[tuple[int, bytes, float]]:
    """Yield number, bytes and the fraction of the file read so far, of each line; a byte order mark is left out.

    Raises:
        InputError: a compressed file is damaged.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        if path.suffix != ".gz":
            read = 0
            for number, line in enumerate(file, start=1):
                read += len(line)
                yield number, line if number > 1 else line.removeprefix(codecs.BOM_UTF8), read / size
            return
        try:
            for number, line in enumerate(gzip.GzipFile(fileobj=file), start=1):
                yield number, line if number > 1 else line.removeprefix(codecs.BOM_UTF8), file.tell() / size
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path} is a damaged gzip file: {error}") from error


def read_json_lines(path: Path) -> Iterator[Record]:
    """Yield the objects of a file of JSON lines; InputError, with file and line, for what is none."""
    for number, line, part in read_lines(path):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = parse_json(decode_utf8(line, where), where)
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise InputError(f"{where} is nested too deeply") from None
        if not isinstance(record, dict):
            raise InputError(f"{where}: expected a JSON object, got {line.strip()[:60]!r}")
        yield record, where, part


class JsonLines(FileSource):
    """One JSON object per line (`.jsonl`, `.jsonl.gz`), UTF-8; blank lines are skipped."""

    class Config(FileSource.Config):
        origin: str = ""  # source of the files, named in the error if they are missing

    def records(self, path: Path, fields: tuple[str, ...]) -> Iterator[Record]:
        """Yield the records of a file."""
        del fields
        return read_json_lines(path)


class PlainText(FileSource):
    """UTF-8 text: documents separated by blank lines, or one per file. Records have one field, `text`."""

    class Config(FileSource.Config):
        document: Literal["paragraph", "file"] = "paragraph"
        origin: str = ""  # source of the files, named in the error if they are missing

    def __init__(self, cfg: Config):
        self._whole = cfg.document == "file"
        super().__init__(cfg)

    def records(self, path: Path, fields: tuple[str, ...]) -> Iterator[Record]:
        """Yield the records of a file."""
        del fields
        lines: list[str] = []
        first = 1
        for number, line, part in read_lines(path):
            text = decode_utf8(line, f"{path}, line {number}").replace("\r\n", "\n")
            if text.strip() or self._whole:
                first = first if lines else number
                lines.append(text)
            elif lines:
                yield {"text": "".join(lines).rstrip("\n")}, f"{path}, line {first}", part
                lines = []
        text = "".join(lines) if self._whole else "".join(lines).rstrip("\n")
        if text.strip():
            yield {"text": text}, f"{path}, line {first}", 1.0


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
                yield from _texts(text, fields, where)


def _texts(line: str, fields: Sequence[str], where: str) -> Iterator[str]:
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
