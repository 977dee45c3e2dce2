"""Rows of tables as dictionaries: JSON lines, JSON, Parquet, Arrow, and directories of Hugging Face datasets.

Directories are read as files, without network and without the library that wrote them: those of `save_to_disk`
(Arrow), and clones of a dataset's repository (Parquet, Arrow or JSON lines).
"""

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axlearn_like.input.encoding import decode_utf8, parse_json
from axlearn_like.input.file_source import find_files
from axlearn_like.input.line_formats import read_json_lines
from axlearn_like.input.record_formats import batch_rows, read_parquet
from axlearn_like.input.source import InputError
from mesh.errors import did_you_mean, install_hint

__all__ = ["FORMATS", "find_tables", "read_rows"]

FORMATS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow")

Row = tuple[Mapping[str, Any], str]  # fields, location


def find_tables(files: str | tuple[str, ...], split: str = "train") -> list[Path]:
    """Return the files of paths, globs and directories of datasets, of which one split is taken.

    Raises:
        InputError: nothing is found, with the nearest names; or a file of no known form.
    """
    found: list[Path] = []
    for pattern in (files,) if isinstance(files, str) else files:
        folder = Path(os.path.expandvars(pattern)).expanduser()
        found += _dataset(folder, split) if folder.is_dir() else find_files(pattern)
    for path in found:
        if not path.name.endswith(FORMATS):
            raise InputError(f"{path}: expected a name that ends with one of {', '.join(FORMATS)}")
    if not found:
        raise InputError("no files are named")
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file with their locations, in order; InputError, with the location, for what is none."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        records = ((record, where) for record, where, _ in read_json_lines(path))
    elif path.name.endswith((".json", ".json.gz")):
        records = _json(path)
    elif path.name.endswith(".parquet"):
        records = ((record, where) for record, where, _ in read_parquet(path))
    else:
        records = _arrow(path)
    return records


def _json(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON document: a list, or an object of which one member is a list of objects."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is a damaged gzip file: {error}") from error
    try:
        document = parse_json(decode_utf8(data.removeprefix(codecs.BOM_UTF8), str(path)), str(path))
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    except json.JSONDecodeError as error:
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
        yield row, f"{path}, element {number}"


def _arrow(path: Path) -> Iterator[Row]:
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
                    yield row, f"{path}, row {number}"
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
    tables = sorted(path for path in folder.rglob("*") if path.name.endswith(FORMATS[:2] + FORMATS[4:]))
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
