"""Arrays as grey pictures, coded by HEVC: predicted from neighbours, transformed, and quantised by x265.

A row has an offset of its own, all rows have one scale, and the range becomes 0 to 255 (LLM.265, MICRO 2025). The
pictures are coded each for itself, at the coarsest QP that keeps the error. PyAV is imported when it is used.

    blob = checksum, head, offsets of rows (float16, if there are any), the stream
"""

import dataclasses
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mesh import UserError
from rl.parameter_server.codecs.layout import (
    CHECKSUM_NBYTES,
    Blob,
    add_checksum,
    contiguous,
    flat_bytes,
    from_bytes,
    is_float,
    strip_checksum,
)
from rl.parameter_server.codecs.rows import as_rows, centred, columns_of, from_rows, with_means
from rl.parameter_server.errors import WeightsError

_HEAD = struct.Struct("<QdddB")  # entries, scale, least, mean, True with offsets of rows
_WIDTH, _HEIGHT = 512, 2048  # picture at most; rows that are wider are cut
_NARROW = 64  # columns below which rows lie beside each other
_SIDE = 32  # least side of a picture that x265 takes
_FINEST, _COARSEST = 0, 51  # QP


@dataclasses.dataclass(frozen=True)
class HevcCodec:
    """Codec of arrays whose neighbours are alike, such as keys of consecutive tokens; other dtypes are sent unchanged.

    Attributes:
        error: mean square error over the variance of the array that the QP is chosen for. Eight bits have a floor:
            below it the finest QP is taken.
        qp: the QP, in place of `error`.
        preset: preset of x265.
    """

    name = "hevc"
    lossless = False
    needs_base = False

    error: float = 1e-3
    qp: int | None = None
    preset: str = "medium"

    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        """Return the blob.

        Raises:
            UserError: PyAV is not installed.
            WeightsError: an entry is infinite, NaN, or beyond float32; names the first.
        """
        del base
        load_av()
        array = contiguous(array)
        if not is_float(array.dtype):
            return _blob(flat_bytes(array))
        rows = as_rows(self.name, array)
        if not rows.size:
            return _blob()
        values, mean, offsets = centred(rows)
        least, most = float(values.min()), float(values.max())
        scale = (most - least) / 255 or 1.0
        wanted = (values - least) / scale
        levels = np.clip(np.rint(wanted), 0, 255).astype(np.uint8)
        head = _HEAD.pack(rows.size, scale, least, mean, len(offsets) > 0)
        allowed = self.error * float(np.var(rows, dtype=np.float64)) / scale**2
        stream = self._stream(levels, wanted, allowed)
        return _blob(np.frombuffer(head, np.uint8), flat_bytes(offsets), np.frombuffer(stream, np.uint8))

    def _stream(self, levels: np.ndarray, wanted: np.ndarray, allowed: float) -> bytes:
        """Return the stream at the QP; or at the coarsest whose mean square error, in levels, is allowed."""
        pictures = _pictures(levels)
        if self.qp is not None:
            return _encode(pictures, self.qp, self.preset)
        low, high, best = _FINEST, _COARSEST + 1, b""
        while high - low > 1 or not best:
            middle = (low + high) // 2
            stream = _encode(pictures, middle, self.preset)
            found = _levels(_decode(stream), levels.shape)
            if float(np.mean((found - wanted) ** 2)) <= allowed or middle == _FINEST:
                low, best = middle, stream
            else:
                high = middle
        return best

    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the array (see `TensorCodec.decode`; UserError: PyAV is not installed)."""
        del base
        load_av()
        body, dtype = strip_checksum(self.name, blob), np.dtype(dtype)
        size, columns = int(np.prod(shape, dtype=np.int64)), columns_of(shape)
        if not is_float(dtype) or not size:
            return from_bytes(self.name, body, shape, dtype)
        try:
            entries, scale, least, mean, with_offsets = _HEAD.unpack_from(body)
            if entries != size:
                raise ValueError(f"{entries} entries, expected {size}")
            rows, at = size // columns, _HEAD.size
            offsets = np.frombuffer(body, np.float16, rows if with_offsets else 0, at)
            pictures = _decode(bytes(body[at + offsets.nbytes :]))
            values = _levels(pictures, (rows, columns)).astype(np.float64) * scale + least
        except (struct.error, ValueError, load_av().FFmpegError) as error:
            raise WeightsError(f"hevc weights are damaged or of another array: {error}") from error
        return from_rows(with_means(values, mean, offsets), shape, dtype)


def load_av() -> Any:
    """Return PyAV.

    Raises:
        UserError: it is not installed; names the extra.
    """
    try:
        import av
    except ImportError:
        raise UserError("the codec 'hevc' needs PyAV; expected pip install 'axlearn-like[video]'") from None
    return av


def _layout(rows: int, columns: int) -> tuple[int, int, int]:
    """Return (rows laid beside each other, width and height of a picture) for rows of so many columns."""
    if columns > _WIDTH or rows == 1:
        width = min(_WIDTH, max(_SIDE, rows * columns))
        return 0, width, min(_HEIGHT, max(_SIDE, -(-rows * columns // width)))
    beside = min(rows, -(-_NARROW // columns))
    return beside, max(_SIDE, beside * columns), min(_HEIGHT, max(_SIDE, -(-rows // beside)))


def _pictures(levels: np.ndarray) -> np.ndarray:
    """Return uint8 [pictures, height, width] of uint8 [rows, columns]; what is left over repeats the edge."""
    rows, columns = levels.shape
    beside, width, height = _layout(rows, columns)
    if beside:
        tall = -(-rows // beside)
        whole = np.pad(levels, ((0, beside * tall - rows), (0, 0)), "edge")
        plane = whole.reshape(beside, tall, columns).transpose(1, 0, 2).reshape(tall, beside * columns)
    else:
        flat = levels.reshape(-1)
        plane = np.pad(flat, (0, -len(flat) % width), "edge").reshape(-1, width)
    plane = np.pad(plane, ((0, -len(plane) % height), (0, width - plane.shape[1])), "edge")
    return plane.reshape(-1, height, width)


def _levels(pictures: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the levels that `_pictures` was made of (ValueError: the pictures are of another array)."""
    rows, columns = shape
    beside, width, height = _layout(rows, columns)
    tall = -(-rows // beside) if beside else -(-rows * columns // width)
    if pictures.shape != (-(-tall // height), height, width):
        raise ValueError(f"pictures of shape {pictures.shape} for an array of {rows} rows of {columns}")
    plane = pictures.reshape(-1, width)[:tall]
    if not beside:
        return plane.reshape(-1)[: rows * columns].reshape(shape)
    plane = plane[:, : beside * columns].reshape(tall, beside, columns).transpose(1, 0, 2)
    return plane.reshape(-1, columns)[:rows]


def _encode(pictures: np.ndarray, qp: int, preset: str) -> bytes:
    """Return an HEVC stream of grey pictures in full range, each coded for itself."""
    av = load_av()
    context = av.CodecContext.create("libx265", "w")
    context.height, context.width = pictures.shape[1:]
    context.pix_fmt, context.color_range, context.time_base = "gray", 2, Fraction(1, 25)
    fixed = "keyint=1:range=full:info=0:log-level=none:pools=1:frame-threads=1:ipratio=1"
    context.options = {"preset": preset, "tune": "psnr", "x265-params": f"qp={qp}:{fixed}"}
    packets = []
    for number, picture in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="gray")
        frame.pts = number
        packets += context.encode(frame)
    packets += context.encode(None)
    return b"".join(bytes(packet) for packet in packets)


def _decode(stream: bytes) -> np.ndarray:
    """Return the pictures of a stream, uint8 [pictures, height, width] (ValueError: there are none)."""
    context = load_av().CodecContext.create("hevc", "r")
    packets = [*context.parse(stream), *context.parse(None)] if stream else []
    frames = [frame for packet in packets for frame in context.decode(packet)] + context.decode(None)
    if not frames or any(frame.format.name != "gray" for frame in frames):
        raise ValueError("the stream holds no grey pictures")
    return np.stack([frame.to_ndarray() for frame in frames])


def _blob(*parts: np.ndarray) -> memoryview:
    return add_checksum(np.concatenate([np.zeros(CHECKSUM_NBYTES, np.uint8), *parts]))
