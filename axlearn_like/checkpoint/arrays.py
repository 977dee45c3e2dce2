"""The saved parameters of one step, read part by part, where all of them have no room in memory."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.checkpoint import reader
from axlearn_like.checkpoint.damage import check_files, check_sizes, open_store, store_fault
from axlearn_like.checkpoint.manifest import Manifest
from axlearn_like.checkpoint.plain.chunks import Layout
from axlearn_like.checkpoint.versions import CheckpointError, find_version

_KEPT = 4  # chunks in memory: of several parameters that lie in one tensor elsewhere


class SavedParams:
    """The parameters of a checkpoint by their names in the manifest; what is read is compared with it."""

    def __init__(self, path: str | Path):
        """`path`: as for `restore_params`. CheckpointError: there is no checkpoint, or it cannot be read."""
        self.path = find_version(path).path
        held = check_files(self.path)
        manifest = reader.read_manifest(self.path)
        self.manifest: Manifest = reader.params_of(manifest)
        check_sizes(self.path, self.manifest, held)
        self._frozen = manifest.get(reader.FROZEN, {})
        self._stores: dict[str, Any] = {}
        self._chunks: OrderedDict[tuple[str, tuple[int, ...]], np.ndarray] = OrderedDict()
        self._sums: dict[str, tuple[int, int]] = {}

    def entry(self, name: str, index: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
        """Return one entry of a stack, its axes in this order, contiguous.

        Raises:
            CheckpointError: with the last entry of the parameter, that what was read is not what was saved.
        """
        store = self._store(name)
        stacked, shape = len(index), tuple(store.shape)
        sizes = store.chunk_layout.read_chunk.shape[:stacked]
        grid = tuple(i // size for i, size in zip(index, sizes, strict=True))
        if (name, grid) not in self._chunks:
            part = tuple(
                slice(g * size, min((g + 1) * size, n)) for g, size, n in zip(grid, sizes, shape, strict=False)
            )
            axes = (*range(stacked), *(stacked + axis for axis in order))
            with self._reading(name):
                found = store[part].transpose(axes).read(order="C").result()
            self._chunks[name, grid] = np.ascontiguousarray(found)
            while len(self._chunks) > _KEPT:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end((name, grid))
        local = tuple(i % size for i, size in zip(index, sizes, strict=True))
        entry = self._chunks[name, grid][local]
        self._compare(name, entry, Layout(shape, str(entry.dtype), stacked, order, 1, 1), index)
        return entry

    def _store(self, name: str) -> Any:
        if name not in self._stores:
            item = self.path / (reader.FROZEN if name in self._frozen else reader.PARAMS)
            with self._reading(name):
                self._stores[name] = store = open_store(item, name).result()
                if (fault := store_fault(name, store, self.manifest[name]["shape"])) is not None:
                    raise ValueError(fault)
        return self._stores[name]

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(f"checkpoint {self.path}: {name} cannot be read ({reader.summary(error)})") from None

    def _compare(self, name: str, entry: np.ndarray, layout: Layout, index: tuple[int, ...]) -> None:
        count = int(np.prod(layout.shape[: layout.stacked]))
        total, seen = self._sums.get(name, (0, 0))
        self._sums[name] = total, seen = total + layout.checksum(entry, index, 0), seen + 1
        if seen == count and total % 2**32 != self.manifest[name]["checksum"]:
            raise CheckpointError(
                f"checkpoint {self.path} is damaged (the content of {name!r} does not match its checksum)"
            )
