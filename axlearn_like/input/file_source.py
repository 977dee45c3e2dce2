"""Sources in files: found by globs, tokenised once, then read at random from the stored tokens."""

import glob
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, override

import numpy as np
import xxhash

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, text_lines
from axlearn_like.input.encoding import Document, Encoding
from axlearn_like.input.source import InputError
from axlearn_like.input.token_cache import Examples, TokenCache, TokenFile
from axlearn_like.run.object_store import fetched_pattern
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import did_you_mean, nearest, taken_from

Record = tuple[Mapping[str, Any], str, float]  # fields, location, fraction of the file read so far


class FileSource(Configurable):
    """The records of files as examples; a format says in `records` how to read one of them.

    Examples are in the order of the files' names and of the records in them. What the tokens of a file depend on is its
    content, the tokenizer's digest, and the other settings of this config but `files` and `cache`.
    """

    class Config(ConfigBase["FileSource"]):
        files: str | tuple[str, ...] = REQUIRED  # paths or globs (`**` for any depth); $NAME is from the environment
        tokenizer: ConfigBase | None = REQUIRED  # tokenizer of the text; None: the files hold token ids
        example: ConfigBase | None = Document.Config()  # conversion of a record to tokens
        cache: str = ""  # folder; "": $XDG_CACHE_HOME/axlearn-like/tokens

        @override
        def reaches(self) -> tuple[str, ...]:
            return (str(self.cache),) if self.cache else ()

    def __init__(self, cfg: Config):
        paths = self.find(cfg.files, getattr(cfg, "origin", ""))
        if cfg.example is None:
            raise InputError(f"{type(self).__name__}.example: expected a conversion of records, such as Chat")
        tokenizer: Tokenizer | None = cfg.tokenizer.build() if cfg.tokenizer else None
        self._encoding: Encoding = cfg.example.build(tokenizer=tokenizer)
        vocab_size = tokenizer.vocab_size if tokenizer else 2**31
        for path in paths:
            self.check(path, self._encoding.fields)
        recipe = "\n".join(
            [
                *(
                    f"{at}: {text}"
                    for at, text in text_lines(cfg).items()
                    if at.split(".")[0] not in ("files", "cache", "tokenizer", "origin")
                ),
                tokenizer.digest if tokenizer else "",
            ]
        )
        self._files = self._tokenised(TokenCache(cfg.cache), paths, recipe, vocab_size)
        _warn_of_short(self._files)
        self._ends = np.cumsum([len(file) for file in self._files])
        self.longest = max((file.longest for file in self._files), key=lambda longest: longest[0])
        self.digest = xxhash.xxh3_128_hexdigest("".join(file.digest for file in self._files).encode())

    def find(self, files: str | tuple[str, ...], origin: str) -> list[Path]:
        """Return the files; see `find_files`."""
        return find_files(files, origin)

    def check(self, path: Path, fields: tuple[str, ...]) -> None:
        """Refuse a file that cannot be read or lacks a field, before anything expensive (InputError)."""

    def records(self, path: Path, fields: tuple[str, ...]) -> Iterator[Record]:
        """Yield the records of a file, with the fields given (others too, if they cost nothing)."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        tokens, mask = self.read(index, 0, int(self.lengths(np.array([index]))[0]))
        return {"tokens": tokens, "loss_mask": mask}

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each example: int64 [k]."""
        out = np.empty(len(indices), np.int64)
        for file, mine, within in self._by_file(indices):
            out[mine] = file.lengths(within)
        return out

    def learned(self, indices: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return how many of the tokens [start, stop) of each example are learned: int64 [k]."""
        out = np.empty(len(indices), np.int64)
        for file, mine, within in self._by_file(indices):
            out[mine] = file.learned(within, starts[mine], stops[mine])
        return out

    def read(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [start, stop) of an example (int32) and their loss mask (bool)."""
        number = int(np.searchsorted(self._ends, index, "right"))
        file = self._files[number]
        return file.read(index - int(self._ends[number]) + len(file), start, stop)

    def _by_file(self, indices: np.ndarray) -> Iterator[tuple[TokenFile, np.ndarray, np.ndarray]]:
        numbers = np.searchsorted(self._ends, indices, "right")
        for number in np.unique(numbers):
            mine, file = numbers == number, self._files[number]
            yield file, mine, indices[mine] - int(self._ends[number]) + len(file)

    def _tokenised(self, cache: TokenCache, paths: list[Path], recipe: str, vocab_size: int) -> list[TokenFile]:
        keys = [cache.key(path, recipe) for path in paths]
        files = [cache.find(path, key) for path, key in zip(paths, keys, strict=True)]
        missing = [(i, paths[i], keys[i]) for i, file in enumerate(files) if file is None]
        for _, path, _ in missing:  # a mistake in the last file should not be found hours later
            if not list(itertools.islice(self._examples(path), 1)):
                raise InputError(f"{path} holds no {type(self).__name__} record")
        busy = [  # files that other processes are tokenising
            task
            for task in missing
            if not cache.make(task[1], task[2], vocab_size, lambda path=task[1]: self._examples(path), wait=False)
        ]
        for _, path, key in busy:
            cache.make(path, key, vocab_size, lambda path=path: self._examples(path), wait=True)
        for i, path, key in missing:
            files[i] = cache.find(path, key)
        found = [file for file in files if file is not None]
        if len(found) < len(files):
            raise InputError(f"tokens of {paths[files.index(None)]} vanished; is the cache being cleared?")
        return found

    def _examples(self, path: Path) -> Examples:
        for record, where, part in self.records(path, self._encoding.fields):
            yield self._encoding.encode(record, where), where, part


def _warn_of_short(files: Sequence[TokenFile]) -> None:
    counts, firsts = zip(*(file.left_out for file in files), strict=True)
    if any(counts):
        of, first = sum(counts) + sum(map(len, files)), next(filter(None, firsts))
        said = f"warning: {sum(counts)} of {of} records have fewer than two tokens and are left out, such as {first}"
        print(said, file=sys.stderr, flush=True)


def find_files(files: str | tuple[str, ...], origin: str = "") -> list[Path]:
    """Return the files of paths and globs, in order; InputError, with the nearest name, if one finds nothing."""
    found: list[Path] = []
    hint = f"; it comes from {origin}" if origin else ""
    for pattern in (files,) if isinstance(files, str) else files:
        pattern = fetched_pattern(pattern, "files")
        pattern = os.path.expandvars(os.path.expanduser(pattern))
        if unset := re.search(r"\$\{?(\w+)", pattern):
            raise InputError(f"{pattern}: the environment variable {unset[1]} is not set{hint}")
        names = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        names = [name for name in names if os.path.isfile(name)]
        if not names and os.path.isdir(pattern):
            endings = {path.suffix for path in Path(pattern).iterdir() if path.is_file() and path.suffix}
            inside = " or ".join(str(Path(pattern, f"*{suffix}")) for suffix in sorted(endings)[:3])
            raise InputError(f"{pattern} is a folder, expected files{inside and f', such as {inside}'}{hint}")
        if not names:
            raise InputError(f"no file matches {pattern}{_nearest(Path(pattern)) or taken_from(pattern)}{hint}")
        found += [Path(name) for name in names]
    if not found:
        raise InputError("a source of files needs at least one path or glob")
    twice = {str(path) for path in found if found.count(path) > 1} if len(set(found)) < len(found) else set()
    if twice:
        raise InputError(f"{min(twice)} is matched twice by {files}")
    empty = [path for path in found if not path.stat().st_size]
    if empty:
        raise InputError(f"{empty[0]} is empty")
    return found


def _nearest(pattern: Path) -> str:
    """Return the nearest names in the first folder of a path that exists: of files, best of the same kind."""
    if pattern.parent.is_dir():
        names = [path.name for path in pattern.parent.iterdir() if not path.name.startswith(".")]
        near = nearest(pattern.name, names)
        same = [name for name in names if pattern.suffix and name.removesuffix(".gz").endswith(pattern.suffix)]
        return did_you_mean(pattern.name, near or same)
    missing = next(path for path in pattern.parents if not path.exists() and path.parent.exists())
    return f": there is no folder {missing}" + did_you_mean(
        missing.name, [path.name for path in missing.parent.iterdir() if path.is_dir() and path.name[0] != "."]
    )
