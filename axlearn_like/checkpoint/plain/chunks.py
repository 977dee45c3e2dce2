"""A checkpoint of parameters that is written chunk by chunk, where a whole parameter has no room in memory.

Each parameter is a zarr array whose chunks are files of plain numbers. Orbax reads it as it reads its own, with a
manifest as any; a chunk may have its axes in another order than the parameter, which the reader transposes. So the
tensors of other programs' files become chunks by copying their bytes.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint import reader
from axlearn_like.checkpoint.manifest import part_checksum
from axlearn_like.checkpoint.plain.plain_arrays import Digests

CHUNK_BYTES = 64 << 20  # default size of a chunk
# Files that Orbax 0.12 writes beside arrays. They are written here: Orbax takes half a second for them.
_HANDLERS = "orbax.checkpoint._src.handlers"
_ARRAYS = "standard_checkpoint_handler.StandardCheckpointHandler"
_TEXT = "json_checkpoint_handler.JsonCheckpointHandler"
_ITEMS = {reader.EXTRAS: _TEXT, reader.MANIFEST: _TEXT, reader.PARAMS: _ARRAYS, reader.REST: _ARRAYS}
_OF_DICT = 2


class Layout(NamedTuple):
    """The chunks of one parameter."""

    shape: tuple[int, ...]  # shape of the parameter
    dtype: str  # dtype of the parameter, as numpy names it
    stacked: int  # number of axes in front that are stacks of entries
    order: tuple[int, ...]  # axes of an entry, in the order in which they are stored
    group: int  # entries of the last stack in one chunk
    rows: int  # indices of the first stored axis in one chunk

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: str, stacked: int, order: tuple[int, ...], limit: int = CHUNK_BYTES
    ) -> "Layout":
        """Return the layout whose chunks have at most `limit` bytes, if an index of the first axis has no more."""
        entry = shape[stacked:]
        size = math.prod(entry) * jnp.dtype(dtype).itemsize
        first = entry[order[0]] if order else 1
        if stacked and size <= limit:
            group = max(n for n in range(1, shape[stacked - 1] + 1) if not shape[stacked - 1] % n and n * size <= limit)
            return cls(shape, dtype, stacked, order, group, first)
        return cls(shape, dtype, stacked, order, 1, math.ceil(first / max(1, math.ceil(size / limit))))

    @property
    def chunk(self) -> tuple[int, ...]:
        """The shape of a chunk, in the axes of the parameter."""
        stack = [1] * (self.stacked - 1) + [self.group] * (self.stacked > 0)
        entry = list(self.shape[self.stacked :])
        if self.order:
            entry[self.order[0]] = self.rows
        return (*stack, *entry)

    @property
    def nbytes(self) -> int:
        """The bytes of the parameter."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def position(self, index: tuple[int, ...], row: int) -> tuple[str, int]:
        """Return the name of the chunk that has this entry's row, and the first byte of the row in it."""
        grid = [0] * len(self.shape)
        entry = math.prod(self.chunk[self.stacked :]) * jnp.dtype(self.dtype).itemsize
        place = 0
        if self.stacked:
            grid[: self.stacked] = [*index[:-1], index[-1] // self.group]
            place = index[-1] % self.group * entry
        if self.order:
            grid[self.stacked + self.order[0]] = row // self.rows
            place += row % self.rows * (entry // self.rows)
        return "c" + "".join(f".{number}" for number in grid), place

    def checksum(self, block: np.ndarray, index: tuple[int, ...], row: int) -> int:
        """Return what a block of one entry, in stored order and from `row` on, adds to the manifest's checksum."""
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        first = sum(i * stride for i, stride in zip(index, strides, strict=False))
        own = [strides[self.stacked + axis] for axis in self.order]
        return part_checksum(block, own, first + (row * own[0] if own else 0))

    def metadata(self) -> dict[str, Any]:
        """Return the `zarr.json`."""
        order = [*range(self.stacked), *(self.stacked + axis for axis in self.order)]
        transpose = {"name": "transpose", "configuration": {"order": order}}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "fill_value": 0.0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [
                *([transpose] if order != sorted(order) else []),
                {"name": "bytes", "configuration": {"endian": "little"}},
            ],
        }


def create(folder: Path, layouts: Mapping[str, Layout]) -> Path:
    """Write everything of a checkpoint of step 0 but its chunks, and return the directory for the parameters.

    Args:
        layouts: path of the parameter, its keys joined by slashes -> layout.
    """
    step, small = folder / "0", Layout((), "int32", 0, (), 1, 1)
    params = _write_arrays(step / reader.PARAMS, layouts)
    (_write_arrays(step / reader.REST, {"step": small}) / "step" / "c").write_bytes(bytes(4))
    manifest = {
        reader.REST: {"step": {"shape": [], "dtype": "int32", "checksum": 0}},
        reader.EXTRAS: {"json": {"digest": reader.digest_of({})}},
    }
    for item, content in ((reader.MANIFEST, manifest), (reader.EXTRAS, {})):
        (step / item).mkdir()
        (step / item / "metadata").write_text(json.dumps(content))
    now = time.time_ns()
    described = {
        "item_handlers": {item: f"{_HANDLERS}.{kind}" for item, kind in _ITEMS.items()},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(described))
    for done in (step, *(step / item for item in _ITEMS)):
        (done / "commit_success.txt").write_text(f"Checkpoint commit was successful to {done}")
    return params


def _write_arrays(folder: Path, layouts: Mapping[str, Layout]) -> Path:
    """Write what describes arrays, as Orbax does for those of dicts; returns the folder."""
    trees: dict[str, Any] = {}
    for name, layout in layouts.items():
        keys = name.split("/")
        trees[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": _OF_DICT} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        array = folder / directory_name(name)
        array.mkdir(parents=True)
        (array / "zarr.json").write_text(json.dumps(layout.metadata()))
    described = {
        "tree_metadata": trees,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / "_METADATA").write_text(json.dumps(described))
    return folder


def chunk_bytes(layout: Layout) -> int:
    """Return the bytes of each chunk's file."""
    return math.prod(layout.chunk) * jnp.dtype(layout.dtype).itemsize


def directory_name(name: str) -> str:
    """Return the name of a parameter's directory."""
    return name.replace("/", ".")


def finish(
    folder: Path, layouts: Mapping[str, Layout], checksums: Mapping[str, int], digests: Digests | None = None
) -> None:
    """Write the manifest; now the checkpoint is complete. Everything is on disk when this returns.

    Args:
        digests: digests of the chunks' files, which are faster to compare.
    """
    path = folder / "0" / reader.MANIFEST / "metadata"
    manifest = json.loads(path.read_text())
    manifest[reader.PARAMS] = {
        name: {"shape": list(layout.shape), "dtype": layout.dtype, "checksum": checksums[name] % 2**32}
        for name, layout in layouts.items()
    }
    if digests is not None:
        manifest[reader.CHUNKS] = digests
    path.write_text(json.dumps(manifest))
    sync(p for p in folder.rglob("*") if p.is_dir() or not p.name.startswith("c."))


def sync(paths: Iterable[Path]) -> None:
    """Wait until these files and directories are on the disk."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
