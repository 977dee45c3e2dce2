"""Folders of buckets by URL: gs://, and whatever else fsspec has a library for (s3://, abfs://, hf://).

A request that a bucket did not answer is made again, with growing pauses, for a few minutes; a missing bucket, or a
missing right, is one error at once.
"""

import contextlib
import inspect
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from mesh.errors import UserError, did_you_mean, install_hint

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # pathlib makes one slash of two
_PATIENCE = 300.0  # seconds for one request, all repetitions together
_FIRST = 20.0  # the same until there has been an answer: the name may be wrong
_TIMEOUT = 120.0  # seconds for one answer
_THREADS = 8  # files on their way at a time
_TRANSIENT = ("aiohttp", "requests", "urllib3", "botocore")  # libraries whose own errors are those of the network
_REFUSED = (401, 403)
_MARKS = ("size", "generation", "etag", "ETag", "md5Hash", "updated", "mtime", "LastModified", "created", "oid")


class BucketError(UserError, OSError):
    """A bucket, or a file in one, that cannot be reached, read or written; the message names it by its URL."""


def bucket_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that a path is, `file://` apart; None for a path of this machine."""
    found = _URL.match(os.fspath(path))
    return f"{found[1]}://{found[2].rstrip('/')}" if found and found[1] != "file" else None


class Bucket:
    """The files below one URL, by their names relative to it; a URL of a file has one, named ``."."``."""

    def __init__(self, url: str, what: str):
        """Find the library; nothing is asked yet.

        Args:
            url: as `bucket_url` returns it.

        Raises:
            BucketError: no library serves such URLs, or it is not installed; the URL names no bucket.
        """
        self.url, self._what = url, what
        self._fs = _filesystem(url, what)
        self._root = url.partition("://")[2]
        self._patience = _FIRST

    def files(self) -> dict[str, tuple[int, str]]:
        """Return name -> (bytes, a mark that changes with the content). BucketError: it cannot be listed."""
        self._fs.invalidate_cache()
        found: Mapping[str, Any] = self._do("list", "", lambda: self._fs.find(self._root, detail=True))
        listed: dict[str, tuple[int, str]] = {}
        for key, info in found.items():
            name = key.strip("/").removeprefix(self._root).strip("/") or "."
            if key.endswith("/"):  # a folder as an object of its own
                continue
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or str(path) != name:
                raise BucketError(f"{self._what}: {self.url} holds {name!r}; expected the name of a file within it")
            listed[name] = int(info["size"]), repr([info.get(mark) for mark in _MARKS])
        return listed

    def get(self, wanted: Mapping[str, Path], sizes: Mapping[str, int]) -> None:
        """Copy files here, each complete or not at all.

        Args:
            wanted: name -> path; its folder is made.
            sizes: bytes of each, as listed.

        Raises:
            BucketError: one cannot be read, or is shorter than listed.
        """

        def get(item: tuple[str, Path]) -> None:
            name, path = item
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")

            def copy() -> None:
                self._fs.get_file(self._key(name), str(partial))
                if partial.stat().st_size < sizes[name]:
                    raise ConnectionError(f"got {partial.stat().st_size:,} of {sizes[name]:,} bytes")

            try:
                self._do("read", name, copy)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

        _together(get, wanted.items())

    def put(self, files: Mapping[str, Path]) -> None:
        """Copy files there: name -> path. BucketError: one cannot be written."""

        def put(item: tuple[str, Path]) -> None:
            name, path = item
            self._do("write", name, lambda: self._fs.put_file(str(path), self._key(name)))

        _together(put, files.items())

    def copy(self, source: str, target: str) -> None:
        """Copy a file within the bucket (BucketError)."""
        self._do("write", target, lambda: self._fs.cp_file(self._key(source), self._key(target)))

    def read(self, name: str) -> bytes:
        """Return the content of a file (BucketError)."""
        return self._do("read", name, lambda: self._fs.cat_file(self._key(name)))

    def write(self, name: str, content: bytes) -> None:
        """Write a file (BucketError)."""
        self._do("write", name, lambda: self._fs.pipe_file(self._key(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that is not there yet, by a precondition that the bucket checks; False: another one is there."""

        def create() -> bool:
            try:
                self._fs.pipe_file(self._key(name), content, mode="create")
            except FileExistsError:
                return self._fs.cat_file(self._key(name)) == content  # a request whose answer was lost wrote it
            return True

        return self._do("write", name, create)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; one that is not there is no error (BucketError)."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._key(name))

        _together(lambda name: self._do("delete", name, lambda: remove(name)), names)

    def _key(self, name: str) -> str:
        return self._root if name == "." else f"{self._root}/{name}"

    def _do[T](self, verb: str, name: str, request: Callable[[], T]) -> T:
        deadline, pause = time.monotonic() + self._patience, 1.0
        while True:
            try:
                found, self._patience = request(), _PATIENCE
                return found
            except Exception as error:
                if not _is_transient(error) or time.monotonic() + pause > deadline:
                    raise BucketError(f"{self._what}: {self._reason(verb, name, error)}") from error
            time.sleep(pause)
            pause = min(2 * pause, 30.0)

    def _reason(self, verb: str, name: str, error: Exception) -> str:
        where = self._key(name).join((self.url.partition("://")[0] + "://", "")) if name else self.url
        text = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
        if isinstance(error, FileNotFoundError):
            bucket = "/".join(self.url.split("/")[:3])
            return f"{where} is not there (404): expected a bucket {bucket} that exists, with that file"
        if _is_refused(error):
            return (
                f"no right to {verb} {where} ({text}); for gs://, log in by `gcloud auth application-default login`, "
                "set GOOGLE_APPLICATION_CREDENTIALS, or give this machine's account the role Storage Object User"
            )
        return f"could not {verb} {where}: {text}"


def _filesystem(url: str, what: str) -> Any:
    """Return fsspec's file system for a URL, with the library's own retries and without its logs."""
    scheme, _, rest = url.partition("://")
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks a second service first, up to 120 s
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]
        from fsspec.registry import known_implementations  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise BucketError(f"{what}: {url} needs fsspec: {install_hint('gcs')}") from None
    if scheme not in fsspec.available_protocols():
        near = did_you_mean(scheme, ("gs", "s3", "abfs", "hf", "memory"))
        raise BucketError(f"{what}={url!r}: no library serves {scheme}://{near}")
    if not rest.partition("/")[0]:
        raise BucketError(f"{what}={url!r}: expected {scheme}://BUCKET/PATH")
    for library in ("gcsfs", "google.auth"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # a traceback for each error that is raised, too
    settings: dict[str, Any] = {"requests_timeout": _TIMEOUT} if scheme in ("gs", "gcs") else {}
    try:
        made_by: Any = fsspec.get_filesystem_class(scheme)  # pyright: ignore[reportUnknownMemberType]
        _, *asked = inspect.signature(made_by.__init__).parameters.values()
        if needs := [one.name for one in asked if one.default is one.empty and "*" not in str(one)]:
            has = "gs://, s3://, abfs:// or hf://, or a folder where it is mounted"
            raise BucketError(f"{what}={url!r}: {scheme}:// needs {', '.join(needs)} beside a URL; expected {has}")
        return fsspec.filesystem(scheme, use_listings_cache=False, **settings)  # pyright: ignore[reportUnknownMemberType]
    except BucketError:
        raise
    except ImportError as error:
        need = install_hint("gcs") if scheme in ("gs", "gcs") else known_implementations[scheme].get("err", error)
        raise BucketError(f"{what}={url!r}: {scheme}:// needs a library that is not installed: {need}") from None
    except Exception as error:  # each library has errors of its own for missing credentials
        raise BucketError(f"{what}={url!r}: cannot be opened: {type(error).__name__}: {error}") from error


def _is_transient(error: Exception) -> bool:
    """Return True if the same request may succeed later."""
    if (code := _code(error)) is not None:
        return code in (408, 429) or code >= 500
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, (TimeoutError, ConnectionError)) or library in _TRANSIENT


def _is_refused(error: Exception) -> bool:
    library = type(error).__module__
    refused = isinstance(error, PermissionError) or "Credential" in type(error).__name__
    return refused or _code(error) in _REFUSED or library.startswith("google.auth") or str(error)[:9] == "Forbidden"


def _code(error: Exception) -> int | None:
    code = str(getattr(error, "code", None) or getattr(error, "status", None))
    return int(code) if code.isdecimal() else None


def _together[T](work: Callable[[T], None], items: Iterable[T]) -> None:
    """Do the work for all items, several at a time; the first error ends it."""
    with ThreadPoolExecutor(_THREADS, "bucket") as threads:
        for done in [threads.submit(work, item) for item in items]:
            try:
                done.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
