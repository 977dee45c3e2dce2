"""A table of rows in memory, checked as they are read: each kept as the bytes of its JSON form."""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import xxhash

from axlearn_like.input.record_formats import short_float
from axlearn_like.input.source import InputError
from mesh.errors import UserError
from rl.tasks.heldout import question_digest
from rl.tasks.rows.columns import Columns
from rl.tasks.rows.sources import RowSource


class RowTable:
    """Rows by number, whose columns have been found to be right."""

    def __init__(self, columns: Columns, name: str):
        self._columns, self._name = columns, name
        self._rows: list[bytes] = []
        self._digests: list[int] = []
        self._content = xxhash.xxh3_128()

    def add(self, source: RowSource) -> None:
        """Append the rows of a source; InputError names the first that is wrong, and the field."""
        first, ids = len(self._rows), dict[str, str]()
        try:
            for row, where in source.rows():
                question, _ = self._columns.question(row, where)
                self._columns.answer(row, where)
                identity = self._columns.identity(row, len(self._rows), where)
                if identity in ids:
                    raise InputError(f"{where}: the id {identity!r} is also that of {ids[identity]}")
                ids[identity] = where
                data = _packed(row)
                self._rows.append(data)
                self._digests.append(question_digest(question))
                self._content.update(len(data).to_bytes(8, "big") + data)
        except UserError as error:
            raise InputError(f"task {self._name!r}: {error}") from None
        if len(self._rows) == first:
            raise InputError(f"task {self._name!r} has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return json.loads(self._rows[number])

    @property
    def digests(self) -> np.ndarray:
        """The digest of each row's question: uint64 [rows]."""
        return np.array(self._digests, np.uint64)

    @property
    def digest(self) -> str:
        """A checksum of all rows."""
        return self._content.hexdigest()


def _packed(row: Mapping[str, Any]) -> bytes:
    """Return the JSON form of a row, without columns that have none: images, bytes."""
    try:
        return json.dumps(dict(row), default=_plain).encode()
    except (TypeError, ValueError, RecursionError):
        return json.dumps({name: value for name, value in row.items() if _fits(value)}, default=_plain).encode()


def _fits(value: Any) -> bool:
    try:
        json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "isoformat"):  # dates and times
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, np.floating):
        return short_float(value)
    if isinstance(value, np.ndarray):
        return list(value)
    if hasattr(value, "tolist"):  # numpy's other scalars, and arrays of other libraries
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be kept")
