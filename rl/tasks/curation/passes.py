"""Passes over rows: read one by one, kept or removed for a reason, written, and reported."""

import contextlib
import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import IO, Any

from axlearn_like.input.encoding import find_field, text_of
from axlearn_like.input.rows.tables import find_tables, read_rows
from axlearn_like.input.source import InputError
from rl.tasks.curation.checks import Check
from rl.tasks.heldout import is_heldout

Row = Mapping[str, Any]
_SHOWN = 20  # removed rows of each reason that the report quotes
SplitRule = Callable[[Row, str], str]


def read_all(files: Sequence[str]) -> Iterator[tuple[Row, str]]:
    """Yield the rows of files, one by one, with their locations."""
    for path in find_tables(tuple(files)):
        yield from read_rows(path)


def curate(
    rows: Iterable[tuple[Row, str]], checks: Sequence[Check], out: Path, *, removed: Path | None = None
) -> dict[str, Any]:
    """Write the rows that all checks let stay to `out`, in order, and return a report.

    Args:
        rows: with locations.
        checks: in order; the first that says why a row goes decides.
        out: .jsonl or .jsonl.gz; written as a whole or not at all.
        removed: file for the rows that go, with fields `removed` (reason, detail) and `where`.

    Returns:
        {"read", "kept", "removed": {reason: count}, "examples": {reason: [{"where", "detail"}]}}.
    """
    counts: Counter[str] = Counter()
    examples: dict[str, list[dict[str, str]]] = {}
    read = 0
    with _writer(out) as kept, _writer(removed) if removed else contextlib.nullcontext() as gone:
        for row, where in rows:
            read += 1
            verdict = next((found for check in checks if (found := check(row, where)) is not None), None)
            if verdict is None:
                _write(kept, row, where)
                continue
            reason, detail = verdict
            counts[reason] += 1
            quoted = examples.setdefault(reason, [])
            if len(quoted) < _SHOWN:
                quoted.append({"where": where, "detail": detail})
            if gone is not None:
                _write(gone, {**row, "removed": [reason, detail], "where": where}, where)
        if read == sum(counts.values()):
            raise InputError(f"nothing would be left of {read} rows ({_told(counts)}); no file is written")
    return {"read": read, "kept": read - sum(counts.values()), "removed": dict(counts), "examples": examples}


def write_rows(rows: Iterable[tuple[Row, str]], out: Path) -> int:
    """Write rows to a file, and return how many they are."""
    count = 0
    with _writer(out) as file:
        for row, where in rows:
            _write(file, row, where)
            count += 1
    return count


def split(rows: Iterable[tuple[Row, str]], rule: SplitRule, outs: Mapping[str, Path]) -> dict[str, Any]:
    """Write each row to the file of its part, in order, and return a report: {"read", part: rows}."""
    counts = dict.fromkeys(outs, 0)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_writer(path)) for name, path in outs.items()}
        for row, where in rows:
            part = rule(row, where)
            _write(files[part], row, where)
            counts[part] += 1
        if empty := [name for name, count in counts.items() if not count]:
            raise InputError(
                f"the part {empty[0]!r} would be empty, of {sum(counts.values())} rows; no file is written"
            )
    return {"read": sum(counts.values()), **counts}


def split_by_text(field: str, every: int) -> SplitRule:
    """Return the rule of `TaskMixture.heldout_every`: rows of equal text are in one part."""
    return lambda row, where: "test" if is_heldout(text_of(row, field, where), every) else "train"


def split_by_date(field: str, first: str) -> SplitRule:
    """Return the rule by which rows from a day on (ISO, such as 2025-01-01) are the test."""
    begin = _day(first, "--from")
    return lambda row, where: "test" if _day(find_field(row, field), f"{where}, field {field!r}") >= begin else "train"


def _day(value: Any, where: str) -> date:
    if isinstance(value, datetime):
        return value.date()
    if isinstance(value, date):
        return value
    try:
        return datetime.fromisoformat(str(value)).date()
    except ValueError:
        raise InputError(f"{where}: expected a date like 2025-01-31, got {value!r:.60}") from None


@contextlib.contextmanager
def _writer(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes its name when it is complete."""
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise InputError(f"{path}: expected a name that ends with .jsonl or .jsonl.gz")
    temporary = path.with_name(f"{path.name}.tmp")
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = open(temporary, "wb")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw as file:
            yield file  # pyright: ignore[reportReturnType]
    except BaseException:
        temporary.unlink(missing_ok=True)
        for folder in made:
            with contextlib.suppress(OSError):  # has something of another
                folder.rmdir()
        raise
    os.replace(temporary, path)


def _write(file: IO[bytes], row: Row, where: str) -> None:
    try:
        file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
