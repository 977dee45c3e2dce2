"""The pieces of the versions that one process holds: of a parameter server's shard, or of a worker that serves others.

Nothing here knows which pieces make up a whole tensor: that is the directory's business. Memory is never freed by
hand: what is read is a view that keeps its memory alive, so a version can be dropped while it is being read.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mesh import UserError, did_you_mean
from rl.parameter_server.digest import as_bytes, digest_of
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.index_ranges import Box, covering, describe, shape_of, slices, volume, within
from rl.parameter_server.transport.shared_memory import Segment

# Between these numpy and XLA agree to the bit, NaN included. To float16 they give NaN different payloads.
_CONVERTIBLE = ("bfloat16", "float32")


class Location(NamedTuple):
    """Where the bytes of a box lie in shared memory."""

    segment: str
    offset: int


class PieceStore:
    """Pieces (tensor, box, array) by version. Thread-safe; its lock is never held while bytes are copied or compared.

    Arrays that are read are read-only, since most are the memory of the store itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[int, _Version] = {}

    def add(
        self,
        version: int,
        pieces: Sequence[tuple[str, Box, np.ndarray]],
        *,
        keep_alive: object = None,
        digests: Sequence[str] = (),
    ) -> None:
        """Hold the pieces: all of them or, if one is refused, none. A version is held from its first piece on.

        Args:
            version: the version's number.
            pieces: tensor, box, and the array with what is in the box. Contiguous arrays are kept as they are, and
                the caller leaves them alone from now on. A piece that is held already must have the same bytes.
            keep_alive: what the arrays' memory depends on; let go after the last reader of any of them. If it is a
                `Segment` made by this process, it is the store's from now on: its name goes when none of its pieces
                is held any more (at once, if all of them were held before).
            digests: of the pieces, by their order, if the caller has computed them.

        Raises:
            WeightsError: a piece has not the shape of its box, not the dtype of its tensor's other pieces, or not
                the bytes of the same piece that is held.
        """
        segment = keep_alive if isinstance(keep_alive, Segment) else None
        arriving: dict[tuple[str, Box], _Piece] = {}
        for tensor, box, array in pieces:
            name = _name(version, tensor, box)
            if array.shape != shape_of(box):
                raise WeightsError(f"{name}: the array that came has the shape {array.shape}")
            tied = _tied(array, keep_alive)
            piece = _Piece(tied, segment if segment is not None and _lies_in(tied, segment) else None)
            _require_same(name, arriving.setdefault((tensor, box), piece).array, piece.array)
        compared: dict[tuple[str, Box], _Piece] = {}
        while True:
            with self._lock:
                entry = self._versions.get(version) or _Version(version)
                held = {key: piece for key in arriving if (piece := entry.get(*key)) is not None}
                if all(compared.get(key) is piece for key, piece in held.items()):
                    entry.insert({key: piece for key, piece in arriving.items() if key not in held})
                    if entry.tensors:
                        self._versions[version] = entry
                    kept = self._segments()
                    break
            for key, piece in held.items():
                _require_same(_name(version, *key), piece.array, arriving[key].array)
            compared = held
        for (tensor, box, _), digest in zip(pieces, digests, strict=bool(digests)):
            if (tensor, box) not in held:
                entry.digests.get((tensor, box, None), lambda known=digest: known)
        if segment is not None and segment.name not in kept:
            segment.unlink()

    def read(self, version: int, tensor: str, box: Box, dtype: str | None = None) -> np.ndarray:
        """What is in the box, C-contiguous: a view where it lies in one piece without gaps, else assembled.

        Args:
            version, tensor, box: of what.
            dtype: name of the dtype it is to have, if not that of the pieces. Rounds to nearest even, as
                `jnp.astype`. Pieces are converted whole, each once, and the conversions kept as long as the version.

        Raises:
            VersionGone: no piece of the version is held.
            WeightsError: the box is not held whole, or there is no conversion to the dtype.
        """
        return self._entry(version).read(tensor, box, dtype)

    def where(self, version: int, tensor: str, box: Box, dtype: str | None = None) -> Location | None:
        """Where in shared memory the bytes of `read` lie; None if they do not, or not in one run. Raises as `read`."""
        piece = self._entry(version).view(tensor, box, dtype)
        if piece is None or piece.segment is None or not piece.array.size:
            return None
        return Location(piece.segment.name, _address(piece.array) - _address(piece.segment.buffer))

    def digest(self, version: int, tensor: str, box: Box, dtype: str | None = None) -> str:
        """xxh3_128 of the bytes of `read`, in hexadecimal; computed once. Raises as `read`."""
        entry = self._entry(version)

        def compute() -> str:
            return digest_of(entry.read(tensor, box, dtype))

        return entry.digests.get((tensor, box, dtype), compute)

    def versions(self) -> list[int]:
        """The versions of which pieces are held, ascending."""
        with self._lock:
            return sorted(self._versions)

    def pieces(self, version: int) -> list[tuple[str, Box, np.ndarray]]:
        """All that is held of the version, conversions apart. Raises VersionGone."""
        tensors = self._entry(version).tensors
        return [(tensor, box, piece.array) for tensor, held in list(tensors.items()) for box, piece in held.items()]

    def drop(self, version: int) -> None:
        """Forget the version, if it is held. What was read of it stays readable."""
        self._keep(lambda number: number != version)

    def drop_all_but(self, versions: Collection[int]) -> None:
        """Forget all other versions."""
        self._keep(lambda number: number in versions)

    def nbytes(self, version: int | None = None) -> int:
        """Bytes of the pieces held and of their conversions, of one version or of all."""
        with self._lock:
            entries = [entry for number, entry in self._versions.items() if version in (None, number)]
        return sum(piece.array.nbytes for entry in entries for piece in entry.everything())

    def _entry(self, version: int) -> "_Version":
        with self._lock:
            entry = self._versions.get(version)
            if entry is None:
                held = ", ".join(map(str, sorted(self._versions))) or "none"
                raise VersionGone(f"version {version} of the weights is not held here; versions held: {held}")
            return entry

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        with self._lock:
            before, entries = self._segments(), self._versions
            self._versions = {number: entry for number, entry in entries.items() if wanted(number)}
            after = self._segments()
        for number, entry in entries.items():
            if not wanted(number):
                entry.withdraw()
        for name, segment in before.items():
            if name not in after:
                segment.unlink()

    def _segments(self) -> dict[str, Segment]:
        return {name: segment for entry in self._versions.values() for name, segment in entry.segments.items()}


class _Piece(NamedTuple):
    array: np.ndarray  # read-only, C-contiguous
    segment: Segment | None  # the shared memory that it lies in


class _Version:
    """What is held of one version. The dict of a tensor is replaced, never changed, so that readers need no lock."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensors: dict[str, dict[Box, _Piece]] = {}
        self.segments: dict[str, Segment] = {}
        self.conversions: _Once[_Piece] = _Once()
        self._rooms: dict[tuple[str, Box, str], _Piece | None] = {}  # where in shared memory conversions are to be put
        self._segments_of_rooms: list[Segment] = []
        self._withdrawn = False
        self._rooms_lock = threading.Lock()
        self.digests: _Once[str] = _Once()

    def get(self, tensor: str, box: Box) -> _Piece | None:
        return self.tensors.get(tensor, {}).get(box)

    def insert(self, pieces: dict[tuple[str, Box], _Piece]) -> None:
        new: dict[str, dict[Box, _Piece]] = {}
        for (tensor, box), piece in pieces.items():
            held = new.setdefault(tensor, dict(self.tensors.get(tensor, {})))
            held[box] = piece
            other_box, other = next(iter(held.items()))
            if (piece.array.dtype, piece.array.ndim) != (other.array.dtype, other.array.ndim):
                raise WeightsError(
                    f"{_name(self.number, tensor, box)}: {piece.array.ndim}-d {piece.array.dtype} came, but the piece "
                    f"{describe(other_box)} is {other.array.ndim}-d {other.array.dtype}"
                )
        self.tensors |= new
        self.segments |= {piece.segment.name: piece.segment for piece in pieces.values() if piece.segment is not None}

    def view(self, tensor: str, box: Box, dtype: str | None) -> _Piece | None:
        """The box as a part without gaps of one piece, if it is that."""
        outer = _around(box, self._of(tensor, box))
        if outer is None:
            return None
        piece = self._converted(tensor, outer, dtype)
        part = piece.array[(*slices(box, outer), ...)]
        return _Piece(part, piece.segment) if part.flags.c_contiguous else None

    def read(self, tensor: str, box: Box, dtype: str | None) -> np.ndarray:
        piece = self.view(tensor, box, dtype)
        if piece is not None:
            return piece.array
        held = self._of(tensor, box)
        parts = _parts(box, tuple(sorted(held)))
        if not parts and volume(box):
            more = f", ... ({len(held)} in all)" if len(held) > 8 else ""
            listed = ", ".join(map(describe, sorted(held)[:8])) + more
            raise WeightsError(f"{_name(self.number, tensor, box)} is not held whole; boxes held: {listed}")
        array = np.empty(shape_of(box), dtype or next(iter(held.values())).array.dtype)
        for part, outer in parts:
            source = self._converted(tensor, outer, dtype).array[(*slices(part, outer), ...)]
            np.copyto(_bits(array)[(*slices(part, box), ...)], _bits(source))
        array.flags.writeable = False
        return array

    def withdraw(self) -> None:
        """From now on no conversion is found in shared memory; who has mapped one keeps it."""
        with self._rooms_lock:
            self._withdrawn = True
            for segment in self._segments_of_rooms:
                segment.unlink()

    def everything(self) -> list[_Piece]:
        """Pieces and conversions."""
        return [piece for held in list(self.tensors.values()) for piece in held.values()] + self.conversions.done()

    def _of(self, tensor: str, box: Box) -> dict[Box, _Piece]:
        held = self.tensors.get(tensor)
        if held is None:
            raise WeightsError(
                f"version {self.number} of the weights: no piece of tensor {tensor!r} is held here"
                + did_you_mean(tensor, list(self.tensors))
            )
        if len(box) != len(other := next(iter(held))):
            raise WeightsError(
                f"{_name(self.number, tensor, box)}: a tensor of {len(other)} dimensions was asked for {len(box)}"
            )
        return held

    def _converted(self, tensor: str, box: Box, dtype: str | None) -> _Piece:
        piece = self.tensors[tensor][box]
        if dtype in (None, piece.array.dtype.name):
            return piece
        for name in (piece.array.dtype.name, dtype):
            if name not in _CONVERTIBLE:
                raise WeightsError(
                    f"{_name(self.number, tensor, box)} is {piece.array.dtype} and cannot be had as {dtype}: "
                    f"the conversions are between {' and '.join(_CONVERTIBLE)}"
                )

        def convert() -> _Piece:
            room = self._room(tensor, box, dtype) if piece.segment else None
            room = room or _Piece(np.empty(shape_of(box), dtype), None)
            with np.errstate(over="ignore", invalid="ignore"):  # to inf, and NaN to NaN, without a word, as in jax
                np.copyto(room.array, piece.array, casting="unsafe")
            return _Piece(_tied(room.array, room.segment), room.segment)

        return self.conversions.get((tensor, box, dtype), convert)

    def _room(self, tensor: str, box: Box, dtype: str) -> _Piece | None:
        """Shared memory for the conversion of a piece that lies there itself; None if there is not so much.

        One segment for the conversions of all such pieces: whoever needs one of them will need most.
        """
        wanted = (tensor, box, dtype)
        with self._rooms_lock:
            if wanted not in self._rooms:
                (other,) = set(_CONVERTIBLE) - {dtype}
                boxes = [
                    (name, box)
                    for name, held in list(self.tensors.items())
                    for box, piece in held.items()
                    if piece.segment and piece.array.dtype.name == other and (name, box, dtype) not in self._rooms
                ]
                sizes = [volume(box) * np.dtype(dtype).itemsize for _, box in boxes]
                *starts, end = itertools.accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
                segment = None
                with contextlib.suppress(UserError):
                    segment = Segment.create(end)
                    self._segments_of_rooms.append(segment)
                    if self._withdrawn:
                        segment.unlink()
                for (name, box), start, size in zip(boxes, starts, sizes, strict=True):
                    self._rooms[name, box, dtype] = segment and _Piece(
                        segment.buffer[start : start + size].view(dtype).reshape(shape_of(box)), segment
                    )
            return self._rooms[wanted]


class _Once[T]:
    """Results that several threads may ask for and one computes, while the others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        with self._lock:
            future = self._futures.get(key)
            first = future is None
            if future is None:
                future = self._futures[key] = Future()
        if first:
            try:
                future.set_result(compute())
            except BaseException as error:
                with self._lock:
                    del self._futures[key]
                future.set_exception(error)
        return future.result()

    def done(self) -> list[T]:
        with self._lock:
            futures = list(self._futures.values())
        return [future.result() for future in futures if future.done() and future.exception() is None]


class _Tied:
    """Memory for `np.asarray`: arrays over it keep the owner alive, and cannot be written to."""

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self.owner = (array, owner)
        self.__array_interface__ = {**as_bytes(array).__array_interface__, "data": (_address(array), True)}


def _tied(array: np.ndarray, owner: object) -> np.ndarray:
    """The array, C-contiguous and read-only; without a copy if it was contiguous, and then it keeps the owner alive."""
    if not array.flags.c_contiguous or owner is None or not array.size:
        tied = np.asarray(array, order="C").view()
        tied.flags.writeable = False
        return tied
    return np.asarray(_Tied(array, owner)).view(array.dtype).reshape(array.shape)


def _bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers, which numpy copies faster than dtypes that are not its own."""
    return array.view(f"u{array.itemsize}") if array.itemsize in (1, 2, 4, 8) else array


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _lies_in(array: np.ndarray, segment: Segment) -> bool:
    start = _address(array) - _address(segment.buffer)
    return array.size > 0 and 0 <= start <= segment.nbytes - array.nbytes


@lru_cache(maxsize=1024)
def _parts(box: Box, held: tuple[Box, ...]) -> list[tuple[Box, Box]]:
    """What the box is assembled from, each part with a held box that has it. Of a thousand pieces this takes longer
    than to copy them, but it is the same for every version.
    """
    return [(part, outer) for part in covering(box, held) if (outer := _around(part, held)) is not None]


def _around(box: Box, held: Collection[Box]) -> Box | None:
    """A held box that has all of the box."""
    return box if box in held else next((outer for outer in held if within(box, outer)), None)


def _require_same(name: str, held: np.ndarray, arrived: np.ndarray) -> None:
    if held.dtype != arrived.dtype:
        raise WeightsError(f"{name} is held as {held.dtype}, and came again as {arrived.dtype}")
    if held is not arrived and not np.array_equal(as_bytes(held), as_bytes(arrived)):
        raise WeightsError(f"{name} is held, and came again with other bytes")


def _name(version: int, tensor: str, box: Box) -> str:
    return f"version {version} of the weights, tensor {tensor!r}, box {describe(box)}"
