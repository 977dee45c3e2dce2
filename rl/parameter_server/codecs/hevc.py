"""Arrays as grey pictures, coded by HEVC: predicted from neighbours, transformed, and quantised by x265.

A row has an offset of its own, all rows have one scale, and the range becomes 0 to 255 (LLM.265, MICRO 2025). The
pictures are coded each for itself, at the coarsest QP that keeps the error. PyAV is imported when it is used.

    rest = head, the stream
"""

import dataclasses
import struct
from fractions import Fraction
from typing import Any, override

import numpy as np

from mesh import UserError
from rl.parameter_server.codecs.rows import BodyReader, RowCodec

_HEAD = struct.Struct("<dd")  # scale, least
_WIDTH, _HEIGHT = 512, 2048  # picture at most; rows that are wider are cut
_NARROW = 64  # columns below which rows lie beside each other
_SIDE = 32  # least side of a picture that x265 takes
_FINEST, _COARSEST = 0, 51  # QP


@dataclasses.dataclass(frozen=True)
class HevcCodec(RowCodec):
    """Codec of arrays whose neighbours are alike, such as keys of consecutive tokens.

    The QP is chosen for the error. Eight bits have a floor: below it the finest QP is taken.
    """

    name = "hevc"

    qp: int | None = None  # the QP, in place of `error`
    preset: str = "medium"  # preset of x265

    @override
    def encode_rows(self, values: np.ndarray, error: float) -> list[np.ndarray]:
        least, most = float(values.min()), float(values.max())
        scale = (most - least) / 255 or 1.0
        wanted = (values - least) / scale
        levels = np.clip(np.rint(wanted), 0, 255).astype(np.uint8)
        stream = self._stream(levels, wanted, error / scale**2)
        return [np.frombuffer(part, np.uint8) for part in (_HEAD.pack(scale, least), stream)]

    @override
    def decode_rows(self, reader: BodyReader, rows: int, columns: int) -> np.ndarray:
        scale, least = reader.unpack(_HEAD)
        pictures = _decode(reader.take(np.uint8, reader.left).tobytes())
        return _levels(pictures, (rows, columns)).astype(np.float64) * scale + least

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


def load_av() -> Any:
    """Return PyAV (UserError: it is not installed; names the extra)."""
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
    av = load_av()
    context = av.CodecContext.create("hevc", "r")
    try:
        packets = [*context.parse(stream), *context.parse(None)] if stream else []
        frames = [frame for packet in packets for frame in context.decode(packet)] + context.decode(None)
    except av.FFmpegError as error:
        raise ValueError(str(error)) from error
    if not frames or any(frame.format.name != "gray" for frame in frames):
        raise ValueError("the stream holds no grey pictures")
    return np.stack([frame.to_ndarray() for frame in frames])
