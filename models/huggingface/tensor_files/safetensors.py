"""Safetensors files: the header checked in full, tensors as views of the mapped file; and files written in place.

The `safetensors` library copies each tensor that it reads, and writes files that are in memory as a whole; neither is
done here. The format: eight bytes with the length of a JSON header, the header, and the tensors' bytes.
"""

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint.plain.direct_file import DirectFile
from mesh.files.bounded import check_regular, parse_json
from models.huggingface.rows import ConversionError


class SameFile:
    """The counterpart of `DirectFile` that writes nothing: each append must find its bytes in the file."""

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "rb", buffering=0)
        self.size = 0

    def append(self, block: np.ndarray | bytes) -> None:
        """Compare the next bytes (ConversionError: others, or no more)."""
        data = np.frombuffer(block, np.uint8) if isinstance(block, bytes) else block.reshape(-1).view(np.uint8)
        there = np.fromfile(self._file, np.uint8, len(data))
        if not np.array_equal(there, data):
            raise self._differs()
        self.size += len(data)

    def __enter__(self) -> "SameFile":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        more = self._file.read(1) if error is None else b""
        self._file.close()
        if more:
            raise self._differs()

    def _differs(self) -> ConversionError:
        return ConversionError(f"{self._path} differs behind byte {self.size:,}")


DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
}
# Bounds on what a header makes in memory. The largest models have some 100,000 tensors, in many files.
_LONGEST_HEADER = 24 << 20  # bytes
_MOST_TENSORS = 100_000
_MOST_AXES = 32
_MOST_NUMBERS = 1 << 60  # limit of a shape's elements, with axes of 0 counted as 1


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path  # the file
    dtype: str  # the dtype's name in the format
    shape: tuple[int, ...]  # the tensor's shape
    start: int  # first byte in the file

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def map(self) -> np.ndarray:
        """Return the tensor as a read-only view of the file; memory is taken and given back by the operating system."""
        if not self.nbytes:
            return np.zeros(self.shape, DTYPES[self.dtype])
        begin = self.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            pages = mmap.mmap(file.fileno(), self.start - begin + self.nbytes, access=mmap.ACCESS_READ, offset=begin)
        array = np.frombuffer(pages, np.uint8, self.nbytes, self.start - begin)
        if self.start % np.dtype(DTYPES[self.dtype]).itemsize:
            array = array.copy()  # file without padding of its header
        return array.view(DTYPES[self.dtype]).reshape(self.shape)

    def part(self, first: int, last: int) -> "Stored":
        """Return the rows from `first` to `last`, as a tensor of its own."""
        row = self.nbytes // max(1, self.shape[0])
        return self._replace(shape=(last - first, *self.shape[1:]), start=self.start + first * row)

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return the numbers of rows of the first axis, as `map` returns all."""
        return self.part(first, last).map()

    def stored(self, first: int, last: int) -> tuple["Stored", ...]:
        """Return the parts of files that `rows` reads."""
        return (self.part(first, last),)


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file; every byte of it must belong to one of them.

    Raises:
        ConversionError: truncated, damaged, or not a safetensors file; names the file, and the tensor at fault.
    """
    try:
        found = path.stat()
        size = found.st_size
        check_regular(found.st_mode)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= size - 8:
                raise _damaged(
                    path, f"a header of {length:,} bytes in a file of {size:,}: truncated, or no safetensors"
                )
            if length > _LONGEST_HEADER:
                raise _damaged(path, f"a header of {length:,} bytes; expected at most {_LONGEST_HEADER:,}")
            text = file.read(length)
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        # A tensor has an object and two lists.
        header = parse_json(text, containers=3 * _MOST_TENSORS + 2, pairs=unique)
    except ValueError as error:
        raise _damaged(path, f"the header is not JSON ({error})"[:300]) from None
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_spans(path, tensors, 8 + length, size)
    return tensors


def _entry(path: Path, name: str, entry: Any, data: int) -> Stored:
    """Return the tensor of a header's entry; its bytes are the number that dtype and shape say."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"{name}: expected dtype, shape and data_offsets, got {entry!r}"[:300]) from None
    if not name.isprintable():
        raise _damaged(path, f"{name!r}: not the name of a tensor")
    if not whole:
        said = f"{name}: shape {shape} and data_offsets {[start, stop]} are not numbers from 0 on"
        raise _damaged(path, said[:300])
    if len(shape) > _MOST_AXES:
        raise _damaged(path, f"{name}: a shape of {len(shape):,} axes; expected at most {_MOST_AXES}")
    if math.prod(max(1, number) for number in shape) > _MOST_NUMBERS or stop > _MOST_NUMBERS:
        raise _damaged(path, f"{name}: shape and data_offsets are of more numbers than any file holds")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConversionError(f"{path}: {name}: dtype {dtype!r:.60}; expected one of {', '.join(DTYPES)}")
    tensor = Stored(path, dtype, shape, data + start)
    if tensor.nbytes != stop - start:
        raise _damaged(path, f"{name}: {dtype} {shape} has {tensor.nbytes:,} bytes, the file {stop - start:,}")
    return tensor


def _check_spans(path: Path, tensors: Mapping[str, Stored], begin: int, size: int) -> None:
    """Refuse tensors that overlap, leave bytes unused, or lie beyond the end of the file."""
    last, end = "the header", begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != end:
            verb = "overlap" if tensor.start < end else f"are {tensor.start - end:,} bytes apart"
            raise _damaged(path, f"{last} and {name} {verb}")
        last, end = name, tensor.start + tensor.nbytes
    if end != size:
        what = "truncated" if size < end else "bytes after the last tensor"
        raise _damaged(path, f"{what}: expected {end:,} bytes up to the end of {last}, got {size:,}")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, in which no name may be twice (ValueError)."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name:.100} is there twice")
        found[name] = value
    return found


def _damaged(path: Path, what: str) -> ConversionError:
    return ConversionError(f"{path}: {what}")


class SafetensorsWriter:
    """A file of tensors of known shapes, written one after the other; complete after the `with` block."""

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], file: DirectFile | SameFile | None = None
    ):
        """Begin with the header.

        Args:
            tensors: name -> dtype as the format names it, and shape; in the order of the file.
            file: where the bytes go instead.
        """
        entries, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            start, end = end, end + math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        # The library itself writes this field, and some readers ask for it.
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left = list(entries.items())
        self._file = file or DirectFile(path)
        self._file.append(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, array: np.ndarray) -> None:
        """Write the next tensor: contiguous, of the shape and dtype that were announced."""
        expected, entry = self._left.pop(0)
        start, stop = entry["data_offsets"]
        assert name == expected and array.shape == tuple(entry["shape"]) and array.nbytes == stop - start, name
        self._file.append(array)

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert error is not None or not self._left, "not all tensors were written"
        self._file.__exit__(kind, error, trace)


def shards(sizes: Mapping[str, int], limit: int) -> Iterable[list[str]]:
    """Yield the names of each file's tensors: in order, as many as `limit` bytes hold, at least one."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > limit:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names
