"""The cache of tokenised files: each is made once, completely or not at all, however many processes want it.

A folder's name is a checksum of the file's content, the tokenizer and the options, so a changed file gets a new one.

Tokens of many examples in one folder, memory-mapped: the format of a tokenised file.

tokens.bin   ids of all examples, one after the other: little-endian uint16 (vocabularies up to 65,536) or int32
offsets.npy  int64 [n + 1]: where each example begins
learned.npy  int64 [runs, 2]: [from, to) of the tokens that are learned, positions in tokens.bin
checks.npy   uint32 [n]: checksums of the tokens of each example
meta.json    written last: dtype, counts, and checksums of the three indices

A record of fewer than two tokens has nothing to predict: it is left out, and counted in meta.json.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from axlearn_like.input.encoding import Encoded
from axlearn_like.input.source import InputError, check_example
from axlearn_like.run.disk import raising_disk_full
from axlearn_like.run.progress import bytes_progress
from mesh.files.cache_directory import cache_directory

_INDICES = ("offsets", "learned", "checks")
_NARROW, _WIDE = "<u2", "<i4"


class DamagedCache(Exception):
    """The folder is not what was written."""


class TokenWriter:
    """Writer of a new folder, which is readable once `finish` has returned."""

    def __init__(self, folder: Path, vocab_size: int):
        folder.mkdir(parents=True)
        self._folder = folder
        self._dtype = np.dtype(_NARROW if vocab_size <= 2**16 else _WIDE)
        self._vocab_size = vocab_size
        self._file = open(folder / "tokens.bin", "wb")
        self._offsets, self._learned, self._checks = array("q", [0]), array("q"), array("I")
        self._longest = (0, 0)  # tokens, example
        self._left_out: list[Any] = [0, ""]  # records, location of the first

    def add(self, tokens: Sequence[int] | np.ndarray, loss_mask: Sequence[bool] | np.ndarray, where: str) -> None:
        """Append an example, or leave it out if it is too short; InputError, with `where`, if it is none."""
        if np.ndim(tokens) == 1 and len(tokens) == len(loss_mask) < 2:
            self._left_out = [self._left_out[0] + 1, self._left_out[1] or where]
            return
        ids, mask = check_example(tokens, loss_mask, where)
        if not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise InputError(
                f"{where}: token ids from {ids.min()} to {ids.max()}; expected 0..{self._vocab_size - 1}, "
                "the tokenizer's vocabulary"
            )
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        begin = self._offsets[-1]
        self._longest = max(self._longest, (len(ids), -len(self._checks)))
        self._offsets.append(begin + len(ids))
        self._checks.append(_check(data))
        for at in np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist():
            # A run that begins where the last one ends continues it.
            if len(self._learned) % 2 == 0 and len(self._learned) and self._learned[-1] == begin + at:
                self._learned.pop()
            else:
                self._learned.append(begin + at)

    def finish(self) -> None:
        """Write everything to disk, `meta.json` last. InputError: no example is left."""
        self._close(self._file)
        if not self._checks:
            count, first = self._left_out
            raise InputError(f"{first}: expected two tokens or more, but none of {count} records has them")
        meta: dict[str, Any] = {
            "dtype": self._dtype.str,
            "examples": len(self._checks),
            "tokens": self._offsets[-1],
            "longest": [self._longest[0], -self._longest[1]],
            "left_out": self._left_out,
        }
        kinds = (np.int64, np.int64, np.uint32)
        for name, values, kind in zip(_INDICES, (self._offsets, self._learned, self._checks), kinds, strict=True):
            found = np.asarray(values, kind)
            with open(self._folder / f"{name}.npy", "wb") as file:
                np.save(file, found.reshape(-1, 2) if name == "learned" else found)
                self._close(file)
            meta[name] = _check(found.tobytes())
        with open(self._folder / "meta.json", "w") as file:
            json.dump(meta, file)
            self._close(file)

    def close(self) -> None:
        """Close the file; without `finish` the folder stays unreadable."""
        self._file.close()

    @staticmethod
    def _close(file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()


class TokenFile:
    """Random access to the examples of a folder, as an `IndexedSource`. Raises DamagedCache if it is not complete."""

    def __init__(self, folder: Path, name: str, digest: str):
        self._folder, self._name, self.digest = folder, name, digest
        try:
            meta = json.loads((folder / "meta.json").read_text())
            indices = [np.load(folder / f"{index}.npy", mmap_mode="r") for index in _INDICES]
            if meta["dtype"] not in (_NARROW, _WIDE):  # numbers that a file gives are not to be read as objects
                raise ValueError(f"dtype {meta['dtype']!r}")
            dtype, size = np.dtype(meta["dtype"]), (folder / "tokens.bin").stat().st_size
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise DamagedCache(f"{folder}: {error}") from error
        for index, found in zip(_INDICES, indices, strict=True):
            if _check(found) != meta[index]:
                raise DamagedCache(f"{folder / index}.npy: the checksum differs")
        self._offsets, learned, self._checks = indices
        if size != meta["tokens"] * dtype.itemsize:
            raise DamagedCache(f"{folder / 'tokens.bin'}: {size} bytes, expected {meta['tokens'] * dtype.itemsize}")
        self._tokens = np.memmap(folder / "tokens.bin", dtype, "r")
        self._starts, self._stops = np.array(learned[:, 0]), np.array(learned[:, 1])
        self._before = np.concatenate([[0], np.cumsum(self._stops - self._starts)])  # learned before each run
        self._seen = bytearray(len(self._checks))
        self.tokens: int = meta["tokens"]
        length, example = meta["longest"]
        self.longest = (length, f"example {example} of {name}")
        count, first = meta.get("left_out", (0, ""))
        self.left_out: tuple[int, str] = (count, first)  # records without anything to predict, location of the first

    def __len__(self) -> int:
        return len(self._checks)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each example: int64 [k]."""
        return self._offsets[indices + 1] - self._offsets[indices]

    def learned(self, indices: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return how many of the tokens [start, stop) of each example are learned: int64 [k]."""
        begin = self._offsets[indices]
        return self._learned_before(begin + stops) - self._learned_before(begin + starts)

    def _learned_before(self, positions: np.ndarray) -> np.ndarray:
        """Return how many of the tokens before each position of tokens.bin are learned."""
        run = np.searchsorted(self._starts, positions, "right") - 1
        last = np.maximum(run, 0)
        if not len(self._starts):
            return np.zeros_like(positions)
        inside = np.minimum(positions, self._stops[last]) - self._starts[last]
        return np.where(run < 0, 0, self._before[last] + inside)

    def read(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [start, stop) of an example (int32) and their loss mask (bool)."""
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        if not self._seen[index]:
            if _check(self._tokens[begin:end]) != self._checks[index]:
                raise InputError(
                    f"the tokenised copy of {self._name} is damaged at example {index}; "
                    f"move {self._folder} away, and it is tokenised again"
                )
            self._seen[index] = 1
        mask = np.zeros(stop - start, bool)
        at = begin + start
        for run in range(int(np.searchsorted(self._stops, at, "right")), len(self._starts)):
            if self._starts[run] >= begin + stop:
                break
            mask[max(int(self._starts[run]) - at, 0) : int(self._stops[run]) - at] = True
        return self._tokens[at : begin + stop].astype(np.int32), mask


def _check(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


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
