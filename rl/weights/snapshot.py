"""A version of the weights in the memory of one trainer process: what it pushes, once or, if the server dies, again."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params
from mesh import UserError
from rl.weights.boxes import Box, box_of, needed_boxes, owned_pieces, shape_of, slices, within
from rl.weights.errors import WeightsError
from rl.weights.fingerprint import fingerprint_version
from rl.weights.manifest import TensorSpec
from rl.weights.memory import ALIGNMENT, MEMORY
from rl.weights.shared import Segment

_COPIES = 2  # at a time, beside what is computed and sent meanwhile


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """A box on the host, or on its way there."""

    tensor: str
    box: Box
    nbytes: int
    offset: int  # in the snapshot's memory, in the order in which they are copied
    copy: "Future[np.ndarray]"

    @property
    def array(self) -> np.ndarray:
        """What is in the box, as soon as it is copied."""
        return self.copy.result()


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Can be used while it is being copied: each of its parts is waited for when it is asked for.

    Attributes:
    owned: what this process has to push: every element of the weights lies in one piece of one process.
    others: boxes that its devices hold too, and other processes push.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    owned: tuple[Copied, ...]
    others: tuple[Copied, ...]
    marks: "Future[dict[str, str]]"  # the fingerprints
    memory: Segment | None  # where `owned` lies, if others on this host shall see it

    def wait(self) -> "Snapshot":
        """Until all of it is copied: from then on the devices' arrays may be given up (donated)."""
        for piece in self.owned + self.others:
            piece.copy.result()
        self.marks.result()
        return self

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of every tensor of the version."""
        return self.marks.result()

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.owned)

    @property
    def checksum(self) -> str:
        """Of the whole version's contents, the same on any mesh."""
        return fingerprint_version(self.fingerprints)

    def params(self, like: Params) -> Params:
        """The weights on the devices again, sharded as `like`.

        Raises:
            WeightsError: this process's copy does not hold a box that its devices need.
        """
        held: dict[str, list[Copied]] = {}
        for piece in self.owned + self.others:
            held.setdefault(piece.tensor, []).append(piece)

        def put(path: Any, leaf: jax.Array) -> jax.Array:
            pieces = held.get(name := path_name(path), [])
            return _assemble(f"version {self.version}, {name}", pieces, leaf.shape, leaf.sharding)

        return jax.tree_util.tree_map_with_path(put, like)


def take(params: Params, version: int, marks: "Future[dict[str, str]]", *, shared: bool) -> Snapshot:
    """Begin to copy this process's parts of the weights to the host, the small ones first.

    The copy is one's own: the devices' arrays may be given up (donated) after `Snapshot.wait`.

    Args:
        marks: their fingerprints, which may be computed meanwhile.
        shared: into memory that other processes of this host can map. Where there is not enough of that, into
            ordinary memory.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    named = [(path_name(path), leaf) for path, leaf in leaves]
    owned, others = [], []
    for turn, (name, leaf) in enumerate(named):
        mine = dict(owned_pieces(leaf, turn))
        here = {box_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        owned += [(name, box, part) for box, part in mine.items()]
        others += [(name, box, part) for box, part in here.items() if box not in mine]
    for _, _, part in owned + others:
        part.copy_to_host_async()
    pool = ThreadPoolExecutor(_COPIES, "copy")
    try:
        memory, copied = _copy(owned, shared, pool)
        return Snapshot(
            version=version,
            tensors=tuple(TensorSpec(name, tuple(leaf.shape), leaf.dtype.name) for name, leaf in named),
            owned=copied,
            others=_copy(others, False, pool)[1],
            marks=marks,
            memory=memory,
        )
    finally:
        pool.shutdown(wait=False)  # its threads end when all is copied


def path_name(path: Sequence[Any]) -> str:
    """Keys joined by slashes."""
    return "/".join(str(key.key) for key in path)


def _copy(
    parts: Sequence[tuple[str, Box, jax.Array]], shared: bool, pool: ThreadPoolExecutor
) -> tuple[Segment | None, tuple[Copied, ...]]:
    parts = sorted(parts, key=lambda part: part[2].nbytes)  # so that there is soon something to send
    offsets, end = [], 0
    for _, _, part in parts:
        offsets.append(end)
        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    memory = _segment(end) if shared and end else None
    buffer = MEMORY.empty((end,), np.uint8) if memory is None else memory.buffer

    def copy(box: Box, part: jax.Array, offset: int) -> np.ndarray:
        array = buffer[offset : offset + part.nbytes].view(np.dtype(part.dtype)).reshape(shape_of(box))
        if memory is None:
            np.copyto(array, np.asarray(part))
        else:
            memory.write(np.ascontiguousarray(part), offset)  # its pages are new
        return array

    return memory, tuple(
        Copied(tensor, box, part.nbytes, offset, pool.submit(copy, box, part, offset))
        for (tensor, box, part), offset in zip(parts, offsets, strict=True)
    )


def _segment(nbytes: int) -> Segment | None:
    try:
        return Segment.create(nbytes)
    except UserError:
        return None  # /dev/shm is small in many containers; the bytes take the socket then


def _assemble(
    name: str, pieces: Sequence[Copied], shape: Sequence[int], sharding: jax.sharding.Sharding
) -> jax.Array:
    arrays = []
    for box, devices in needed_boxes(sharding, shape).items():
        piece = next((piece for piece in pieces if within(box, piece.box)), None)
        if piece is None:
            raise WeightsError(f"{name}: box {box} is not in this process's copy")
        part = piece.array[(*slices(box, piece.box), ...)]
        arrays += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)
