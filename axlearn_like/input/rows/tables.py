"""Rows of tables as dictionaries: JSON lines, JSON, CSV, Parquet, Arrow, and directories of Hugging Face datasets.

Directories are read as files, without network and without the library that wrote them: those of `save_to_disk`
(Arrow), and clones of a dataset's repository (Parquet, Arrow, JSON lines or CSV).
"""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.input.encoding import decode_utf8, parse_json, text_of
from axlearn_like.input.file_source import Record, find_files
from axlearn_like.input.line_formats import read_json_lines, read_lines
from axlearn_like.input.record_formats import batch_rows, read_parquet
from axlearn_like.input.source import InputError
from axlearn_like.run.object_store import fetched_pattern
from mesh.errors import did_you_mean, install_hint

_LINES, _SEPARATED, _ARROW = (".jsonl", ".ndjson"), (".csv", ".tsv"), (".arrow", ".feather")
_TEXTS = (*_LINES, ".json", *_SEPARATED)
_DATASET = tuple(f"{name}{end}" for name in (*_LINES, *_SEPARATED) for end in ("", ".gz")) + (".parquet", *_ARROW)
FORMATS = (*_TEXTS, *(f"{name}.gz" for name in _TEXTS), ".parquet", *_ARROW)

Row = tuple[Mapping[str, Any], str]  # fields, location


def find_tables(files: str | tuple[str, ...], split: str = "train") -> list[Path]:
    """Return the files of paths, globs and directories of datasets, of which one split is taken.

    Raises:
        InputError: nothing is found, with the nearest names; or a file of no known form.
    """
    found: list[Path] = []
    for pattern in (files,) if isinstance(files, str) else files:
        pattern = fetched_pattern(os.path.expandvars(pattern), "files")
        folder = Path(pattern).expanduser()
        found += _dataset(folder, split) if folder.is_dir() else find_files(pattern)
    for path in found:
        if not path.name.endswith(FORMATS):
            raise InputError(f"{path}: expected a name that ends with one of {', '.join(FORMATS)}")
    if not found:
        raise InputError("no files are named")
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file with their locations, in order; InputError, with the location, for what is none."""
    return ((record, where) for record, where, _ in read_records(path))


def read_records(path: Path) -> Iterator[Record]:
    """Yield the rows of a file as `read_rows`, with the fraction of the file read so far."""
    name = path.name.removesuffix(".gz")
    if name.endswith(_SEPARATED):
        return _separated(path, "\t" if name.endswith(".tsv") else ",")
    if name.endswith(".json"):
        return _json(path)
    if name.endswith(_ARROW):
        return _arrow(path)
    return read_parquet(path) if name.endswith(".parquet") else read_json_lines(path)


def _separated(path: Path, delimiter: str) -> Iterator[Record]:
    """Yield the rows below a line of names, as RFC 4180 has them; all values are texts."""
    csv.field_size_limit(2**31 - 1)  # a text may be long
    read = [0.0]

    def lines() -> Iterator[str]:
        for number, line, read[0] in read_lines(path):
            yield decode_utf8(line, f"{path}, line {number}")

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    names: list[str] = []
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if not names:
                names = row
                if len(set(names)) < len(names) or not all(names):
                    raise InputError(f"{where}: expected a name for each column, all different, got {names!r:.80}")
            elif row and len(row) != len(names):
                raise InputError(f"{where}: expected {len(names)} values, one for each column, got {len(row)}")
            elif row:
                yield dict(zip(names, row, strict=True)), where, read[0]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from None


def _json(path: Path) -> Iterator[Record]:
    """Yield the objects of a JSON document: a list, or an object of which one member is a list of objects."""
    data = b"".join(line for _, line, _ in read_lines(path))
    try:
        document = parse_json(decode_utf8(data, str(path)), str(path))
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and data.lstrip().startswith(b"{"):  # lines, in spite of the name
            yield from read_json_lines(path)
            return
        at = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{path} is not JSON: {error.msg} at {at}; JSON lines end with .jsonl") from None
    rows = document
    if isinstance(document, dict):
        lists = [value for value in document.values() if isinstance(value, list) and value]
        rows = lists[0] if len(lists) == 1 else None
    if not isinstance(rows, list):
        raise InputError(f"{path}: expected a list of objects, or an object with one list of them")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f"{path}, element {number}: expected an object, got {row!r:.60}")
        yield row, f"{path}, element {number}", (number + 1) / len(rows)


def _arrow(path: Path) -> Iterator[Record]:
    """Yield the rows of an Arrow file, of the stream form (`datasets`) or the file form (Feather)."""
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(f"{path}: Arrow needs pyarrow; {install_hint('data')}") from error
    number = 0
    try:
        with pyarrow.memory_map(str(path)) as data:
            reader: Any
            try:
                reader = pyarrow.ipc.open_stream(data)
            except pyarrow.ArrowInvalid:
                file = pyarrow.ipc.open_file(data)
                reader = (file.get_batch(index) for index in range(file.num_record_batches))
            for batch in reader:
                for row in batch_rows(batch):
                    yield row, f"{path}, row {number}", data.tell() / data.size()
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a whole Arrow file: {error}") from error


def _dataset(folder: Path, split: str) -> list[Path]:
    """Return the files of one split of a dataset's directory, in order."""
    if (folder / "dataset_dict.json").is_file():
        known = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if split not in known:
            raise InputError(f"{folder} has no split {split!r}{did_you_mean(split, known)}")
        folder = folder / split
    if (folder / "state.json").is_file():
        listed = json.loads((folder / "state.json").read_text())["_data_files"]
        return [folder / entry["filename"] for entry in listed]
    tables = sorted(path for path in folder.rglob("*") if path.name.endswith(_DATASET))
    tables = [path for path in tables if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    splits: dict[str, list[Path]] = {}
    for path in tables:  # data/train-00000-of-00002.parquet, main/train-00000.parquet, train/0000.parquet, train.jsonl
        inner = path.relative_to(folder)
        name = inner.name.partition(".")[0].partition("-")[0]
        splits.setdefault(inner.parent.name if name.isdigit() else name, []).append(path)
    if split not in splits:
        raise InputError(f"{folder} has no files of a split {split!r}{did_you_mean(split, splits)}")
    if len(folders := {path.parent for path in splits[split]}) > 1:
        names = ", ".join(sorted(str(path) for path in folders))
        raise InputError(f"{folder} has the split {split!r} in several folders; name one of {names}")
    return splits[split]


def read_texts(files: Sequence[str], fields: Sequence[str] = ()) -> Iterator[str]:
    """Yield the texts of files in their order: the lines of .txt and .txt.gz, the fields of the rows of others.

    Raises:
        InputError: a file that is not there, damaged or without such a field; names the line.
    """
    paths = [path for pattern in files for path in find_files(pattern)]
    plain = [path.name.endswith((".txt", ".txt.gz")) for path in paths]
    for path, lines in zip(paths, plain, strict=True):  # a mistake in the last one should not be found hours later
        if not lines and not path.name.endswith(FORMATS):
            raise InputError(f"{path}: expected a name that ends with one of .txt, .txt.gz, {', '.join(FORMATS)}")
        if not lines and not fields:
            raise InputError(f"{path} has rows: name the field that holds the text (--field)")
    for path, lines in zip(paths, plain, strict=True):
        if lines:
            yield from (decode_utf8(line, f"{path}, line {number}") for number, line, _ in read_lines(path))
        else:
            yield from (text_of(row, name, where) for row, where in read_rows(path) for name in fields)
