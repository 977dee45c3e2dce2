"""Offloading of versions to disk or to a bucket, for when those in memory are gone.

A version is a directory `v<version>` with one object per distinct shard content, named by its digest, and the object
`manifest`, written last: without it the version does not exist. One process at a time writes to a directory of
versions; any number may read.
"""

import json
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from axlearn_like.run.object_store import open_store, store_text
from mesh import UserError
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import digest_of
from rl.parameter_server.index_ranges import IndexRange, shape_of

if TYPE_CHECKING:
    import tensorstore as ts

_IN_FLIGHT = 256 << 20  # bytes of shards being written or read ahead, if that is more than one shard
_MANIFEST = "manifest"


class _Record(NamedTuple):
    tensor: str
    index_range: IndexRange
    dtype: str
    digest: str  # xxh3_128 of the bytes
    nbytes: int


class OffloadStore:
    """Store of versions in a TensorStore KvStore. Its methods block."""

    def __init__(
        self,
        url: str | Mapping[str, Any],
        keep: int,
        *,
        setting: str = "offload",
        timeout: float = 120.0,
        retries: int = 6,
    ) -> None:
        """Open the directory; nothing is read or written yet.

        Args:
            url: file:///path, file://relative/path or just a path; gs://bucket/path, s3://bucket/path, memory://name;
                or the specification of a KvStore as a dict, for what URLs cannot express (the endpoint of an S3 store).
            keep: number of versions that `retire` keeps.
            setting: config path of the URL, for errors.
            timeout: seconds to wait for any one reply of the store.
            retries: how often an unanswered request to a bucket is retried, with growing pauses.

        Raises:
            UserError: the URL is not one of these, or `keep` is below 1.
        """
        if keep < 1:
            raise UserError(f"{setting}: keep={keep}, expected at least 1")
        self.keep, self.url = keep, store_text(url)
        self._timeout = timeout
        self._lock = threading.Lock()  # lock of all changes
        self._store = open_store(url, setting, timeout=timeout, retries=retries)

    def save(self, version: int, manifest: str, shards: Iterable[tuple[str, IndexRange, np.ndarray]]) -> int:
        """Write a version. It is listed when all of it has been written, and never if that fails.

        Args:
            manifest: any text, which `load` returns.
            shards: tensor, index range, and array of each shard.

        Returns:
            The bytes of the shards written. Shards with the same bytes are written once.

        Raises:
            WeightsError: naming the object that could not be written (disk full, bucket unreachable).
        """
        with self._lock:
            before = self.versions()
            pending: deque[tuple[str, int, ts.Future[Any]]] = deque()
            try:
                records = self._write_shards(version, shards, pending)
                body = json.dumps({"manifest": manifest, "shards": records}, separators=(",", ":")).encode()
                signed = digest_of(body).encode() + b"\n" + body
                name = f"v{version}/{_MANIFEST}"
                self._wait("write", name, self._store.write(name, signed))
            except BaseException:
                deadline = time.time() + 5.0
                for _, _, future in pending:  # waits, or they would appear after the others are deleted
                    with suppress(ValueError, OSError, RuntimeError):
                        future.result(deadline=deadline)
                if version not in before:
                    with suppress(WeightsError):
                        self._delete(version)
                raise
        return sum({record.digest: record.nbytes for record in records}.values())

    def versions(self) -> list[int]:
        """Return the complete versions, ascending."""
        return self._listed(self._keys())

    def load(self, version: int) -> tuple[str, Iterator[tuple[str, IndexRange, np.ndarray]]]:
        """Return the manifest of a version and an iterator over its shards (read-only arrays), which reads ahead.

        Raises:
            VersionGone: the version does not exist, or no longer (also from the iterator).
            WeightsError: naming an object that cannot be read, is missing, or is damaged (also from the iterator).
        """
        name = f"v{version}/{_MANIFEST}"
        found = self._wait("read", name, self._store.read(name))
        if found.state == "missing":
            held = ", ".join(map(str, self.versions())) or "none"
            raise VersionGone(f"offload {self.url} has no version {version}; versions there: {held}")
        digest, _, body = found.value.partition(b"\n")
        if digest_of(body).encode() != digest:
            raise WeightsError(f"offload {self.url}: {name} is damaged ({len(found.value)} bytes)")
        raw = json.loads(body)
        records = [
            _Record(tensor, tuple((start, stop) for start, stop in index_range), *rest)
            for tensor, index_range, *rest in raw["shards"]
        ]
        return raw["manifest"], self._read_shards(version, records)

    def retire(self) -> list[int]:
        """Delete all but the newest `keep` versions, and older incomplete ones; returns those deleted."""
        with self._lock:
            keys = self._keys()
            kept = self._listed(keys)[-self.keep :]
            old = sorted({version for version, _ in keys if kept and version < kept[0]})
            for version in old:
                self._delete(version)
        return old

    def remove(self, version: int) -> None:
        """Delete a version, if it exists."""
        with self._lock:
            self._delete(version)

    def _write_shards(
        self,
        version: int,
        shards: Iterable[tuple[str, IndexRange, np.ndarray]],
        pending: "deque[tuple[str, int, ts.Future[Any]]]",
    ) -> list[_Record]:
        """Write the shards and return their records; on an error `pending` holds the unfinished writes."""
        records: list[_Record] = []
        written: set[str] = set()
        in_flight = 0
        for tensor, index_range, array in shards:
            data = array.tobytes()
            record = _Record(tensor, index_range, array.dtype.name, digest_of(data), len(data))
            records.append(record)
            if record.digest in written:
                continue
            written.add(record.digest)
            while pending and in_flight + len(data) > _IN_FLIGHT:
                in_flight -= self._written(pending)
            name = f"v{version}/{record.digest}"
            pending.append((name, len(data), self._store.write(name, data)))
            in_flight += len(data)
        while pending:
            self._written(pending)
        return records

    def _written(self, pending: "deque[tuple[str, int, ts.Future[Any]]]") -> int:
        name, nbytes, future = pending.popleft()
        self._wait("write", name, future)
        return nbytes

    def _read_shards(self, version: int, records: list[_Record]) -> Iterator[tuple[str, IndexRange, np.ndarray]]:
        ahead: deque[tuple[_Record, ts.Future[ts.KvStore.ReadResult]]] = deque()
        in_flight, following = 0, iter(records)
        record = next(following, None)
        while record is not None or ahead:
            if record is not None and (not ahead or in_flight + record.nbytes <= _IN_FLIGHT):
                ahead.append((record, self._store.read(f"v{version}/{record.digest}")))
                in_flight += record.nbytes
                record = next(following, None)
                continue
            first, future = ahead.popleft()
            in_flight -= first.nbytes
            yield first.tensor, first.index_range, self._checked(version, first, future)

    def _checked(self, version: int, record: _Record, future: "ts.Future[ts.KvStore.ReadResult]") -> np.ndarray:
        name = f"v{version}/{record.digest}"
        what = f"offload {self.url}: {name} (version {version}, tensor {record.tensor!r})"
        found = self._wait("read", name, future)
        if found.state == "missing":
            if version not in self.versions():
                raise VersionGone(f"{what} went while it was read: the version has been retired")
            raise WeightsError(f"{what} is missing")
        if len(found.value) != record.nbytes or digest_of(found.value) != record.digest:
            raise WeightsError(f"{what} is damaged: {len(found.value)} bytes, of {record.nbytes} that were written")
        return np.frombuffer(found.value, np.dtype(record.dtype)).reshape(shape_of(record.index_range))

    def _keys(self) -> list[tuple[int, str]]:
        keys = self._wait("list", "all objects", self._store.list())
        found = (re.fullmatch(r"v(\d+)/(\w+)", key.decode(errors="replace")) for key in keys)
        return [(int(match[1]), match[2]) for match in found if match]

    def _listed(self, keys: list[tuple[int, str]]) -> list[int]:
        return sorted(version for version, name in keys if name == _MANIFEST)

    def _delete(self, version: int) -> None:
        import tensorstore as ts  # the store that is open has imported it

        manifest, rest = (
            f"v{version}/{_MANIFEST}",
            ts.KvStore.KeyRange(f"v{version}/", f"v{version}0"),
        )  # "0" is "/" + 1
        self._wait("delete", manifest, self._store.write(manifest, None))  # first, so that no half version is listed
        self._wait("delete", f"v{version}/*", self._store.delete_range(rest))
        spec = self._store.spec().to_json()
        if spec["driver"] == "file":  # the directory, and the files that a killed process was writing
            shutil.rmtree(Path(spec["path"]) / f"v{version}", ignore_errors=True)

    def _wait[T](self, verb: str, name: str, future: "ts.Future[T]") -> T:
        try:
            return future.result(timeout=self._timeout)
        except TimeoutError as error:
            reason = f"no answer within {self._timeout:g} s"
            raise WeightsError(f"offload {self.url}: cannot {verb} {name}: {reason}") from error
        except (ValueError, OSError, RuntimeError) as error:
            raise WeightsError(f"offload {self.url}: cannot {verb} {name}: {error}") from error
