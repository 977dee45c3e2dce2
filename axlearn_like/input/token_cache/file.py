"""Tokens of many examples in one folder, memory-mapped: the format of a tokenised file.

tokens.bin   ids of all examples, one after the other: little-endian uint16 (vocabularies up to 65,536) or int32
offsets.npy  int64 [n + 1]: where each example begins
learned.npy  int64 [runs, 2]: [from, to) of the tokens that are learned, positions in tokens.bin
checks.npy   uint32 [n]: checksums of the tokens of each example
meta.json    written last: dtype, counts, and checksums of the three indices

A record of fewer than two tokens has nothing to predict: it is left out, and counted in meta.json.
"""

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from axlearn_like.input.source import InputError, check_example

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
