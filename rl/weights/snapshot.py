"""A version of the weights in the memory of one trainer process: what it pushes, once or, if the server dies, again."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params
from mesh import UserError
from rl.weights.boxes import Box, box_of, needed_boxes, owned_pieces, shape_of, slices, within
from rl.weights.errors import WeightsError
from rl.weights.fingerprint import fingerprint_version, path_name
from rl.weights.manifest import TensorSpec
from rl.weights.memory import ALIGNMENT, MEMORY
from rl.weights.shared import Segment

_COPIES = 4  # at a time, if there is as much to copy as
_MUCH = 1 << 24  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """A box on the host."""

    tensor: str
    box: Box
    array: np.ndarray
    offset: int  # in the snapshot's memory


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Attributes:
    owned: what this process has to push: every element of the weights lies in one piece of one process.
    others: boxes that its devices hold too, and other processes push.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    owned: tuple[Copied, ...]
    others: tuple[Copied, ...]
    fingerprints: dict[str, str]
    memory: Segment | None  # where `owned` lies, if others on this host shall see it

    @property
    def nbytes(self) -> int:
        return sum(piece.array.nbytes for piece in self.owned)

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


def take(params: Params, version: int, marks: dict[str, str], *, shared: bool) -> Snapshot:
    """Copy this process's parts of the weights to the host.

    The copy is one's own: the devices' arrays may be given up (donated) as soon as this returns.

    Args:
        marks: their fingerprints.
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
    memory, copied = _copy(owned, shared)
    return Snapshot(
        version=version,
        tensors=tuple(TensorSpec(name, tuple(leaf.shape), leaf.dtype.name) for name, leaf in named),
        owned=copied,
        others=_copy(others, shared=False)[1],
        fingerprints=marks,
        memory=memory,
    )


def _copy(
    parts: Sequence[tuple[str, Box, jax.Array]], shared: bool
) -> tuple[Segment | None, tuple[Copied, ...]]:
    offsets, end = [], 0
    for _, _, part in parts:
        offsets.append(end)
        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    memory = _segment(end) if shared and end else None
    buffer = MEMORY.empty((end,), np.uint8) if memory is None else memory.buffer

    def copy(one: tuple[str, Box, jax.Array], offset: int) -> Copied:
        tensor, box, part = one
        array = buffer[offset : offset + part.nbytes].view(np.dtype(part.dtype)).reshape(shape_of(box))
        if memory is None:
            np.copyto(array, np.asarray(part))
        else:
            memory.write(np.ascontiguousarray(part), offset)  # its pages are new
        return Copied(tensor, box, array, offset)

    if end < _MUCH:
        return memory, tuple(map(copy, parts, offsets))
    with ThreadPoolExecutor(_COPIES, "copy") as pool:
        return memory, tuple(pool.map(copy, parts, offsets))


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
