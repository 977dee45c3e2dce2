"""Files of lines: JSON lines, and plain text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from axlearn_like.input.encoding import decode_utf8
from axlearn_like.input.file_source import FileSource, Record
from axlearn_like.input.source import InputError


class JsonLines(FileSource):
    """One JSON object per line (`.jsonl`), UTF-8; blank lines are skipped."""

    class Config(FileSource.Config):
        pass

    def records(self, path: Path, fields: tuple[str, ...]) -> Iterator[Record]:
        """Yield the records of a file."""
        del fields
        size, read = path.stat().st_size, 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                where = f"{path}, line {number}"
                if not line.strip():
                    continue
                try:
                    record = json.loads(decode_utf8(line, where))
                except json.JSONDecodeError as error:
                    raise InputError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
                if not isinstance(record, dict):
                    raise InputError(f"{where}: expected a JSON object, got {line.strip()[:60]!r}")
                yield record, where, read / size


class PlainText(FileSource):
    """UTF-8 text: documents separated by blank lines, or one per file. Records have one field, `text`."""

    class Config(FileSource.Config):
        document: Literal["paragraph", "file"] = "paragraph"

    def __init__(self, cfg: Config):
        self._whole = cfg.document == "file"
        super().__init__(cfg)

    def records(self, path: Path, fields: tuple[str, ...]) -> Iterator[Record]:
        """Yield the records of a file."""
        del fields
        size, read, lines, first = path.stat().st_size, 0, [], 1
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                text = decode_utf8(line, f"{path}, line {number}").replace("\r\n", "\n")
                if text.strip() or self._whole:
                    first = first if lines else number
                    lines.append(text)
                elif lines:
                    yield {"text": "".join(lines).rstrip("\n")}, f"{path}, line {first}", read / size
                    lines = []
        text = "".join(lines) if self._whole else "".join(lines).rstrip("\n")
        if text.strip():
            yield {"text": text}, f"{path}, line {first}", 1.0
