"""The bytes of a page outside the device: the arrays of all layers, each encoded by a codec, and its routing record."""

import dataclasses
import struct
from collections.abc import Sequence as Items

import numpy as np
import xxhash

from rl.parameter_server.codecs import Blob, TensorCodec
from rl.parameter_server.errors import WeightsError

_LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPage:
    """A page as bytes, and their XXH3-64."""

    blob: Blob
    checksum: int

    @staticmethod
    def of(blob: Blob) -> "StoredPage":
        """Return the page with the checksum of its bytes."""
        return StoredPage(blob, xxhash.xxh3_64_intdigest(blob))

    @property
    def intact(self) -> bool:
        """True if the bytes are those that the checksum was made of."""
        return xxhash.xxh3_64_intdigest(self.blob) == self.checksum


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Keys and values of one page: one array of each kind for all layers, and the experts of its tokens."""

    arrays: tuple[np.ndarray, ...]  # [layers, ...] of each array of the pool, in the order of its tree
    # Routing of its tokens, [page_size, layers with experts, top_k]; None: it is not recorded
    record: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PageForm:
    """Shapes and types of the arrays of a page, and the codec of its bytes."""

    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of each, for all layers
    codec: TensorCodec

    @property
    def nbytes(self) -> int:
        """Bytes of a page on the device."""
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.arrays)

    def pack(self, page: Page) -> StoredPage:
        """Return the page as bytes: length and blob of each array, then its record (WeightsError: not encodable)."""
        parts: list[Blob] = []
        for array in page.arrays:
            blob = self.codec.encode(array)
            parts += [_LENGTH.pack(len(blob)), blob]
        if page.record is not None:
            parts += [_head(page.record), np.ascontiguousarray(page.record).tobytes()]
        return StoredPage.of(b"".join(parts))

    def unpack(self, blob: Blob) -> Page:
        """Return the page of such bytes (WeightsError: they are damaged, or of pages of another form)."""
        view, at, arrays = memoryview(blob).cast("B"), 0, []
        try:
            for shape, dtype in self.arrays:
                (length,) = _LENGTH.unpack_from(view, at)
                at += _LENGTH.size
                arrays.append(self.codec.decode(view[at : at + length], shape=shape, dtype=dtype))
                at += length
            record = None if at == len(view) else _record(view[at:])
        except (struct.error, ValueError, TypeError) as error:
            raise WeightsError(f"a page of {len(view)} bytes is damaged: {error}") from error
        return Page(tuple(arrays), record)

    def described(self) -> list[str]:
        """Return shapes, types and codec as text, to compare with another engine's."""
        return [f"{dtype.name}{list(shape)}" for shape, dtype in self.arrays] + [self.codec.name]


def split_pages(stacked: Items[np.ndarray], count: int, records: Items[np.ndarray | None]) -> list[Page]:
    """Return the first `count` pages of stacked arrays [n, layers, ...], with their records."""
    return [Page(tuple(array[i] for array in stacked), records[i]) for i in range(count)]


def stack_pages(pages: Items[Page], rows: int) -> list[np.ndarray]:
    """Return the arrays of pages stacked, [rows, layers, ...]; rows beyond the pages are zeros."""
    stacked = [np.zeros((rows, *array.shape), array.dtype) for array in pages[0].arrays]
    for i, page in enumerate(pages):
        for whole, array in zip(stacked, page.arrays, strict=True):
            whole[i] = array
    return stacked


def _head(record: np.ndarray) -> bytes:
    text = f"{record.dtype.str}:{','.join(map(str, record.shape))}".encode()
    return _LENGTH.pack(len(text)) + text


def _record(view: memoryview) -> np.ndarray:
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    dtype, _, shape = bytes(view[_LENGTH.size : end]).decode().partition(":")
    return np.frombuffer(view[end:], np.dtype(dtype)).reshape([int(n) for n in shape.split(",")]).copy()
