"""The cache of tokenised files: each is made once, completely or not at all, however many processes want it.

A folder's name is a checksum of the file's content, the tokenizer and the options, so a changed file gets a new one.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from axlearn_like.input.encoding import Encoded
from axlearn_like.input.source import InputError
from axlearn_like.input.token_cache.file import DamagedCache, TokenFile, TokenWriter
from axlearn_like.run.disk import raising_disk_full
from axlearn_like.run.progress import bytes_progress
from mesh.files.cache_directory import cache_directory

_FORMAT = 1
_SETTLED_NS = 2_000_000_000  # a file changed more recently may change again within one tick of its clock

Examples = Iterator[tuple[Encoded, str, float]]  # tokens and loss mask, location, fraction of the file read


class TokenCache:
    """A folder of tokenised files."""

    def __init__(self, directory: str):
        self._root = Path(directory).expanduser() if directory else cache_directory("tokens")
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {self._root} for tokenised data: {error.strerror}") from error

    def key(self, path: Path, recipe: str) -> str:
        """Return the name under which the tokens of a file are stored; `recipe` is all else they depend on."""
        return xxhash.xxh3_128_hexdigest(f"{_FORMAT}\n{self._content(path)}\n{recipe}".encode())

    def find(self, path: Path, key: str) -> TokenFile | None:
        """Return the tokens of a file, if they are stored and complete."""
        if not (self._root / key).exists():
            return None
        try:
            return TokenFile(self._root / key, str(path), key)
        except DamagedCache as error:
            print(f"tokens of {path} are damaged; tokenising again ({error})", file=sys.stderr, flush=True)
            return None

    def make(self, path: Path, key: str, vocab_size: int, examples: Callable[[], Examples], wait: bool) -> bool:
        """Tokenise a file, unless another process has done it already.

        Returns:
            False if another process is tokenising it; with `wait`, True once that process has ended.
        """
        with self._lock(path, key, wait) as mine:
            if not mine:
                return False
            if self.find(path, key) is None:
                with raising_disk_full(self._root):
                    self._make(path, key, vocab_size, examples())
            return True

    def _make(self, path: Path, key: str, vocab_size: int, examples: Examples) -> None:
        final, new = self._root / key, self._root / f"{key}.{uuid.uuid4().hex[:8]}"
        for left in self._root.glob(f"{key}.????????"):  # left by a process that was killed; we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        writer = TokenWriter(new, vocab_size)
        began, nbytes = time.monotonic(), path.stat().st_size
        try:
            with bytes_progress(f"tokenising {path}") as show:
                for (tokens, mask), where, part in examples:
                    writer.add(tokens, mask, where)
                    show(int(part * nbytes), nbytes)
            writer.finish()
            took = f"{nbytes / 1e6:,.1f} MB in {time.monotonic() - began:,.1f} s"
            print(f"tokenised {path}: {took}; kept for the next run", file=sys.stderr, flush=True)
            shutil.rmtree(final, ignore_errors=True)  # existing files are damaged
            try:
                os.rename(new, final)
            except OSError:
                if not final.exists():  # locks may have no effect: another host may have been faster
                    raise
        finally:
            writer.close()
            shutil.rmtree(new, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self, path: Path, key: str, wait: bool) -> Iterator[bool]:
        """Hold the lock of a file, which the system releases when the process dies."""
        with open(self._root / f"{key}.lock", "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    yield False
                    return
                print(f"waiting for another process that tokenises {path}", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield True

    def _content(self, path: Path) -> str:
        """Return a checksum of a file's content, remembered while size and time of the file stay the same."""
        status = path.stat()
        now = {"size": status.st_size, "changed": status.st_mtime_ns}
        memo = self._root / f"{xxhash.xxh3_128_hexdigest(str(path.absolute()).encode())}.file"
        with contextlib.suppress(OSError, ValueError, KeyError):
            before = json.loads(memo.read_text())
            if {name: before[name] for name in now} == now:
                return before["content"]
        digest = xxhash.xxh3_128()
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        if time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
            new = memo.with_suffix(f".{uuid.uuid4().hex[:8]}")
            new.write_text(json.dumps({**now, "content": digest.hexdigest(), "path": str(path.absolute())}))
            os.replace(new, memo)
        return digest.hexdigest()
