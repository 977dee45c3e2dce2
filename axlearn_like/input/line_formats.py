"""Files of lines: JSON lines, and plain text; compressed by gzip if their names end with .gz."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from axlearn_like.input.encoding import decode_utf8, parse_json
from axlearn_like.input.file_source import FileSource, Record
from axlearn_like.input.source import InputError


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
