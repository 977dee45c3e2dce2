"""Parameters whose chunks are files of plain numbers (`chunks`), read without Orbax: mapped, and copied once.

Such files are those of an import. Their axes may lie in another order than the parameter's; they are transposed in
tiles that fit the processor's cache, or by the device on the way to it. Where the import noted the digest of each file,
and all of them are read in whole, the content is compared with those, as it is read.
"""

import itertools
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import NamedSharding, PartitionSpec

from mesh.files.bounded import read_json


class EntriesStruct(jax.ShapeDtypeStruct):
    """Description of a stack that may be given as `StackEntries`; a reader that cannot gives the whole array."""

    @property
    def of_an_entry(self) -> Any:
        """The sharding of an entry."""
        if not isinstance(self.sharding, NamedSharding):
            return self.sharding
        return NamedSharding(self.sharding.mesh, PartitionSpec(*self.sharding.spec[1:]))


class StackEntries:
    """The entries of a stack, along its first axis, as arrays of their own; has the shape and dtype of the stack."""

    def __init__(self, arrays: Sequence[jax.Array]):
        self._arrays = tuple(arrays)
        self.shape: tuple[int, ...] = (len(self._arrays), *self._arrays[0].shape)
        self.dtype: Any = self._arrays[0].dtype

    def __getitem__(self, index: int) -> jax.Array:
        """Return one entry."""
        return self._arrays[index]

    def __iter__(self) -> Iterator[jax.Array]:
        """Yield the entries in order."""
        return iter(self._arrays)

    def astype(self, dtype: Any) -> "StackEntries":
        """Return the entries in another dtype."""
        return self if dtype == self.dtype else StackEntries([array.astype(dtype) for array in self._arrays])


def as_stacks(described: Any) -> Any:
    """Return descriptions without `EntriesStruct`."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, EntriesStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(whole, described)


_THREADS = 2  # parameters in memory at a time, beside those on the devices
_TILE = 64  # bytes: a line of the cache, to which CPU devices need arrays aligned that they use where they lie
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}]
_KEYS = {"name": "default", "configuration": {"separator": "."}}


Digests = Mapping[str, Mapping[str, str]]  # parameter -> chunk -> XXH3-64 of the file, in hexadecimal


class CorruptError(Exception):
    """A file is not what was written."""


class PlainParams(NamedTuple):
    """Parameters by name, and whether every file was compared with its digest."""

    arrays: dict[str, Any]
    verified: bool


class PlainArray(NamedTuple):
    """One parameter on disk."""

    name: str  # name of the parameter
    folder: Path  # folder of its chunks
    shape: tuple[int, ...]  # shape of the parameter
    dtype: np.dtype[Any]  # dtype of its numbers
    chunk: tuple[int, ...]  # the shape of a chunk, in the axes of the parameter
    order: tuple[int, ...]  # axes in the order in which a chunk stores them
    digests: Mapping[str, str] | None  # digests of the chunks' files, None: they are not compared

    @classmethod
    def open(cls, params: Path, name: str, digests: Mapping[str, str] | None = None) -> "PlainArray | None":
        """Return a parameter in a directory; None: it is stored in another way. CorruptError: sizes that cannot be."""
        folder = params / name.replace("/", ".")
        described = read_json(folder / "zarr.json")
        shape, codecs = tuple(described["shape"]), described["codecs"]
        order = tuple(range(len(shape)))
        if codecs and codecs[0]["name"] == "transpose":
            order, codecs = tuple(codecs[0]["configuration"]["order"]), codecs[1:]
        if codecs != _CODECS or described["chunk_key_encoding"] != _KEYS:
            return None
        chunk = tuple(described["chunk_grid"]["configuration"]["chunk_shape"])
        sizes = zip(chunk, shape, strict=True)
        fits = all(type(axis) is type(size) is int and 0 < size <= max(1, axis) for size, axis in sizes)
        if not fits or sorted(order) != list(range(len(shape))):
            raise CorruptError(f"{name!r} of shape {shape} has chunks of {chunk}"[:300])
        return cls(name, folder, shape, jnp.dtype(described["data_type"]), chunk, order, digests)

    def read(self, where: Sequence[slice], buffer: "FileBuffer | None" = None) -> np.ndarray:
        """Return a part of the array. OSError, ValueError: a chunk is missing, or cut off.

        Args:
            where: a slice for each axis, of those that are left out all.
        """
        buffer = FileBuffer() if buffer is None else buffer
        parts = [*where, *[slice(None)] * (len(self.shape) - len(where))]
        spans = [part.indices(size)[:2] for part, size in zip(parts, self.shape, strict=True)]
        bits = np.dtype(f"uint{8 * self.dtype.itemsize}")  # numpy copies them faster than bfloat16
        out = aligned_empty([stop - start for start, stop in spans], bits)
        grid = [range(start // n, -(-stop // n)) for (start, stop), n in zip(spans, self.chunk, strict=True)]
        back = np.argsort(self.order)
        for place in itertools.product(*grid):
            here, there = [], []
            for (start, stop), index, size in zip(spans, place, self.chunk, strict=True):
                first = index * size
                here.append(slice(max(start - first, 0), min(stop - first, size)))
                there.append(slice(max(first - start, 0), min(first + size, stop) - start))
            part = out[tuple(there)]
            stored = self._stored(place, buffer, mapped=2 * part.size < math.prod(self.chunk)).view(bits)
            _copy(part, stored.transpose(back)[tuple(here)], self.order)
        return out.view(self.dtype)

    def entries(self, sharding: Any, buffer: "FileBuffer") -> StackEntries:
        """Return the entries along the first axis, on one device. OSError, ValueError: as `read`."""
        if self.order[0] or self.chunk[1:] != self.shape[1:]:
            each = (self.read((slice(index, index + 1),), buffer)[0] for index in range(self.shape[0]))
            return StackEntries([jax.device_put(entry, sharding) for entry in each])
        found: list[jax.Array] = []
        for number in range(self.shape[0] // self.chunk[0]):
            place = (number, *[0] * (len(self.shape) - 1))
            stack = self._stored(place, buffer).transpose(np.argsort(self.order))
            found += put_copies(list(stack), sharding)  # the device transposes; the buffer is for the next file
        return StackEntries(found)

    def _stored(self, place: Sequence[int], buffer: "FileBuffer", *, mapped: bool = False) -> np.ndarray:
        """Return a chunk as it is stored, until the next call with this buffer."""
        chunk = ".".join(["c", *map(str, place)])
        path, expected = self.folder / chunk, math.prod(self.chunk) * self.dtype.itemsize
        if (size := path.stat().st_size) != expected:
            raise CorruptError(f"the content of {self.name!r} has {size:,} bytes in {chunk}, expected {expected:,}")
        content = buffer.content(path, mapped=mapped)
        if self.digests is not None and xxhash.xxh3_64_hexdigest(content) != self.digests.get(chunk):
            raise CorruptError(f"the content of {self.name!r} does not match its checksum")
        return content.view(self.dtype).reshape([self.chunk[axis] for axis in self.order])


class FileBuffer:
    """Memory for the content of a file, used again for the next: new memory costs more than the reading."""

    def __init__(self) -> None:
        self._memory: np.ndarray = np.empty(0, np.uint8)

    def content(self, path: Path, *, mapped: bool) -> np.ndarray:
        """Return the bytes of a file, until the next call; `mapped`: only what is looked at is read."""
        if mapped:
            return np.memmap(path, np.uint8, "r")
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > len(self._memory):
                self._memory = np.empty(size, np.uint8)
            held, done = memoryview(self._memory[:size]), 0
            while done < size and (count := file.readinto(held[done:])):
                done += count
        return self._memory[:done]


def read_plain(folder: Path, abstract: dict[str, Any], digests: Digests | None = None) -> PlainParams | None:
    """Return parameters in the shardings of `abstract`, or as numpy arrays where that holds such.

    None: they are not all stored as plain chunks.

    Args:
        abstract: by name; of an `EntriesStruct` come `StackEntries` if there are digests, and all goes to one device.
        digests: digests that the import noted.
    """
    by_file = digests if digests is not None and all(map(_on_one_device, abstract.values())) else None
    of_files = {name: None if by_file is None else by_file.get(name, {}) for name in abstract}
    found = {name: PlainArray.open(folder, name, of_files[name]) for name in abstract}
    arrays = {name: array for name, array in found.items() if array is not None}
    if len(arrays) < len(found):
        return None
    for name, array in arrays.items():
        if array.shape != tuple(abstract[name].shape):
            raise CorruptError(f"{name!r} has shape {array.shape}, expected {tuple(abstract[name].shape)}"[:300])

    of_thread = threading.local()

    def read(name: str) -> Any:
        array, like = arrays[name], abstract[name]
        buffer = of_thread.__dict__.setdefault("buffer", FileBuffer())
        if isinstance(like, np.ndarray):
            return array.read((), buffer)
        if like.sharding is None:
            return jax.device_put(array.read((), buffer))
        if by_file is not None and isinstance(like, EntriesStruct):
            return array.entries(like.of_an_entry, buffer)
        return jax.make_array_from_callback(array.shape, like.sharding, lambda where: array.read(where or (), buffer))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="read") as threads:
        read_arrays = dict(zip(arrays, threads.map(read, arrays), strict=True))
    return PlainParams(read_arrays, verified=all(array.digests is not None for array in arrays.values()))


def _on_one_device(like: Any) -> bool:
    """Return True if an array is read in whole, and once."""
    sharding = getattr(like, "sharding", None)
    return sharding is None or len(sharding.device_set) == 1


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return uninitialised memory that a CPU device takes without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _TILE, np.uint8)
    start = -memory.ctypes.data % _TILE
    return memory[start : start + size].view(dtype).reshape(shape)


def put_copies(arrays: Sequence[np.ndarray], sharding: Any) -> list[jax.Array]:
    """Put arrays on devices and wait until they are there: their memory may be overwritten then.

    `jax.device_put(..., may_alias=False)` does not promise that for arrays of numpy (jax 0.12): those that are aligned
    and contiguous stay where they are, on CPU devices. So do parts of them, of several devices: a column of a matrix
    that is transposed is contiguous.
    """
    own = [_copied(array) if _may_stay(array, sharding) else array for array in arrays]
    return jax.block_until_ready([jax.device_put(array, sharding) for array in own])


def _copied(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        return array.copy(order="K")  # memory order is kept: the devices transpose their parts
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _may_stay(array: np.ndarray, sharding: Any) -> bool:
    """Return True if a device may use a part of the array, or all of it, where it lies."""
    devices = jax.local_devices()[:1] if sharding is None else sharding.device_set
    on_host = any(device.platform == "cpu" for device in devices)
    return on_host and (array.flags.c_contiguous or len(devices) > 1)


def _copy(out: np.ndarray, stored: np.ndarray, order: Sequence[int]) -> None:
    """Copy between arrays of the same shape, of which `stored` has its axes in another order in memory."""
    stack = next((axis for axis, place in enumerate(order) if axis != place), None)
    if stack is None:
        out[...] = stored
        return
    axis, step = order[-1] - stack, max(1, _TILE // stored.itemsize)
    for index in np.ndindex(*out.shape[:stack]):
        to, entry = out[index], stored[index]
        for start in range(0, to.shape[axis], step):
            tile = (*[slice(None)] * axis, slice(start, start + step))
            to[tile] = entry[tile]
