"""Sources of the rows of a task: files, a function of the user's, or a Grain source."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, walk_configs
from axlearn_like.input.rows.tables import find_tables, read_rows
from axlearn_like.input.source import InputError
from axlearn_like.run.object_store import fetched_pattern
from mesh.errors import UserError
from mesh.files.bucket import bucket_url


class RowSource(Protocol):
    """Rows in a fixed order."""

    def rows(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each row with its location, for messages."""
        ...


class RowFiles(Configurable):
    """Rows of files: .jsonl, .json (both also .gz), .parquet, .arrow, or a directory of a Hugging Face dataset."""

    class Config(ConfigBase["RowFiles"]):
        files: str | tuple[str, ...] = REQUIRED  # paths, globs and directories; $NAME is from the environment
        split: str = "train"  # split of a directory

    def __init__(self, cfg: Config):
        self._paths = find_tables(cfg.files, cfg.split)

    def rows(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each row with its location."""
        for path in self._paths:
            yield from read_rows(path)


def with_fetched_files[C: ConfigBase[Any]](cfg: C) -> C:
    """Return a config whose rows in buckets are their copies on this machine, for processes without rights to buckets.

    Raises:
        UserError: they cannot be fetched.
    """

    def patterns(rows: RowFiles.Config) -> list[str]:
        named = [rows.files] if isinstance(rows.files, str) else rows.files
        return [os.path.expandvars(one) for one in named]

    def remote(root: C) -> list[RowFiles.Config]:
        found = [one for _, one in walk_configs(root) if isinstance(one, RowFiles.Config)]
        return [one for one in found if any(map(bucket_url, patterns(one)))]

    if remote(cfg):
        cfg = cfg.clone()
        for rows in remote(cfg):
            rows.set(files=tuple(fetched_pattern(one, "files") for one in patterns(rows)))
    return cfg


class RowFunction(Configurable):
    """Rows that a top-level function returns: any iterable of mappings, or a Grain source (random access).

    The function is called in every process that needs the rows, and must return the same ones each time.
    """

    class Config(ConfigBase["RowFunction"]):
        function: Callable[..., Any] = REQUIRED
        arguments: dict[str, Any] = {}

    def __init__(self, cfg: Config):
        self._function, self._arguments = cfg.function, cfg.arguments

    def rows(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each row with its location."""
        name = getattr(self._function, "__qualname__", str(self._function))
        number = 0
        try:
            for row in _iterate(self._function(**self._arguments), name):
                if not isinstance(row, Mapping):
                    raise InputError(f"{name}(), row {number}: expected a mapping of fields, got {row!r:.60}")
                yield row, f"{name}(), row {number}"
                number += 1
        except UserError:
            raise
        except Exception as error:  # user code may raise
            raise InputError(f"{name}() raised {type(error).__name__} at row {number}: {error}") from error


def _iterate(found: Any, name: str) -> Iterable[Any]:
    if hasattr(found, "__getitem__") and hasattr(found, "__len__") and not isinstance(found, Mapping):
        return (found[index] for index in range(len(found)))
    if isinstance(found, Iterable):
        return found
    raise InputError(f"{name}() returned {type(found).__name__}; expected an iterable of rows, or a Grain source")
