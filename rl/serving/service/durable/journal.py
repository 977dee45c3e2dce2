"""A log on disk that survives a kill: what `append` has returned from is there after the next start.

Records are appended with a checksum each and one `fsync` for all that wait. A record that was being written when the
process died is dropped at the next start; nobody was told that it was accepted. A damaged record with sound ones behind
it is an error, by place: what was accepted is never guessed. `compact` rewrites the file with the records that are
still needed.
"""

import json
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mesh import UserError

_MAGIC = b"axlJ"
_HEADER = struct.Struct("<4sIII")  # magic, bytes of the body, checksum of the body, checksum of what is before


class JournalDamaged(UserError):
    """A record that was accepted cannot be read any more."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """A record: JSON, and arrays by name."""

    fields: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the record as it stands in the file."""
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        head = json.dumps([dict(self.fields), described]).encode()
        body = b"".join([struct.pack("<I", len(head)), head, *(array.tobytes() for array in arrays.values())])
        front = struct.pack("<4sII", _MAGIC, len(body), zlib.crc32(body))
        return front + struct.pack("<I", zlib.crc32(front)) + body

    @classmethod
    def decode(cls, body: bytes) -> "JournalRecord":
        """Return the record of a sound body."""
        (size,) = struct.unpack_from("<I", body)
        fields, described = json.loads(body[4 : 4 + size])
        arrays, at = {}, 4 + size
        for name, dtype, shape in described:
            arrays[name] = np.frombuffer(body, dtype, int(np.prod(shape, dtype=np.int64)), at).reshape(shape)
            at += arrays[name].nbytes
        return cls(fields, arrays)


class RequestJournal:
    """A file of records, in the order of `append`. Any thread may call its methods."""

    def __init__(self, path: Path):
        """Open or create the file (JournalDamaged: a record in the middle is not what was written)."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        self._found, sound = parse_records(data, path)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(sound)
        os.fsync(self._file.fileno())
        sync_folder(path.parent)
        self.size = self._compacted = sound  # bytes that are on disk, and that were after the last `compact`
        self._writing = threading.Lock()
        self._waiting: deque[tuple[bytes, Future[None]]] = deque()

    def take_found(self) -> list[JournalRecord]:
        """Return the records that were there at the start, once."""
        found, self._found = self._found, []
        return found

    @property
    def grown(self) -> int:
        """Bytes since the last `compact`."""
        return self.size - self._compacted

    def append(self, record: JournalRecord, *, wait: bool = True) -> None:
        """Append a record; returns when it is on disk or, not `wait`, at once (OSError: it is not there)."""
        self._append(record.encode(), wait)

    def flush(self) -> None:
        """Return when all records so far are on disk."""
        self._append(b"", True)

    def compact(self, needed: Callable[[JournalRecord], bool]) -> None:
        """Drop the records that are not needed; a kill leaves the old file or the new one, whole."""
        self.flush()
        with self._writing:
            records, _ = parse_records(self._path.read_bytes(), self._path)
            new = self._path.with_suffix(".new")
            with new.open("wb") as file:
                for record in records:
                    if needed(record):
                        file.write(record.encode())
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            new.replace(self._path)
            sync_folder(self._path.parent)
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            self.size = self._compacted = size

    def close(self) -> None:
        """Write what waits, and close the file."""
        self.flush()
        self._file.close()

    def _append(self, data: bytes, wait: bool) -> None:
        """Queue bytes; the first of those that wait writes for all."""
        done: Future[None] = Future()
        self._waiting.append((data, done))
        if not wait:
            return
        with self._writing:
            if not done.done():
                some = [self._waiting.popleft() for _ in range(len(self._waiting))]
                error = self._write(b"".join(data for data, _ in some))
                for _, one in some:
                    one.set_exception(error) if error else one.set_result(None)
        if (error := done.exception()) is not None:
            raise error

    def _write(self, data: bytes) -> OSError | None:
        """Write records, or none of them: half of a write is removed by the next one."""
        if not data:
            return None
        try:
            os.ftruncate(self._file.fileno(), self.size)
            done = 0
            while done < len(data):
                done += self._file.write(memoryview(data)[done:])
            os.fsync(self._file.fileno())
        except OSError as error:
            return OSError(error.errno, f"the journal could not be written: {error.strerror}", str(self._path))
        self.size += len(data)
        return None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_records(data: bytes, path: Path) -> tuple[list[JournalRecord], int]:
    """Return the records, and the number of bytes that they take: a rest was not written to its end."""
    records, at = [], 0
    while at < len(data):
        body = _body(data, at)
        if body is None:
            if (sound := next(_sound_after(data, at), None)) is not None:
                raise JournalDamaged(
                    f"{path}: record {len(records)} at byte {at} is damaged, and sound ones follow at byte {sound}; "
                    "restore the file from a copy, or move its folder away to start without it"
                )
            return records, at
        records.append(JournalRecord.decode(body))
        at += _HEADER.size + len(body)
    return records, at


def _body(data: bytes, at: int) -> bytes | None:
    """Return the body of the record at a place; None if it is not whole."""
    if at + _HEADER.size > len(data):
        return None
    magic, size, check, own = _HEADER.unpack_from(data, at)
    body = data[at + _HEADER.size : at + _HEADER.size + size]
    sound = magic == _MAGIC and own == zlib.crc32(data[at : at + _HEADER.size - 4])
    return body if sound and len(body) == size and zlib.crc32(body) == check else None


def _sound_after(data: bytes, at: int) -> Iterator[int]:
    while (at := data.find(_MAGIC, at + 1)) >= 0:
        if _body(data, at) is not None:
            yield at
