"""Host copy of a version in one trainer process: what it pushes, and pushes again if the server dies.

Shards are copied on threads, the largest first, and each is available as soon as it is copied: the first are on their
way to the server while the last are still copied from the device. Frozen parameters are copied once, for the first
version. What is published rounded is rounded on the devices, in the pass of the fingerprints; where these are the CPU
of this host, that is the copy, unless it goes to shared memory.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import path_name
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.fingerprint import fingerprint_version
from rl.parameter_server.index_ranges import (
    IndexRange,
    index_range_of,
    needed_index_ranges,
    owned_shards,
    shape_of,
    slices,
    within,
)
from rl.parameter_server.manifest import TensorSpec
from rl.parameter_server.push.next_segment import NextSegment
from rl.parameter_server.push.rounded_copies import ArrayLease, host_view, on_this_host
from rl.parameter_server.store.arrays import as_unsigned
from rl.parameter_server.store.buffer_pool import ALIGNMENT, BUFFERS
from rl.parameter_server.transport.shared_memory import SharedSegment

_COPIES = 4  # concurrent copies


@dataclasses.dataclass(frozen=True, slots=True)
class HostShard:
    """Shard in host memory."""

    tensor: str
    index_range: IndexRange
    nbytes: int
    offset: int  # offset in its memory
    kept: Future[tuple[SharedSegment | None, np.ndarray]]  # the memory, shared by the shards that were copied with it
    copy: Future[np.ndarray]

    @property
    def array(self) -> np.ndarray:
        """Wait for the copy and return it; raises its error."""
        return self.copy.result()

    @property
    def memory(self) -> SharedSegment | None:
        """Return the shared memory that it lies in, or None if that is private."""
        return self.kept.result()[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Host copy of the shards of one version."""

    version: int
    tensors: tuple[TensorSpec, ...]
    # Shards that this process pushes: every element of the weights lies in one shard of one process
    owned: tuple[HostShard, ...]
    others: tuple[HostShard, ...]  # shards that its devices hold, too, and other processes push
    copied: int  # bytes of `owned` that were copied for this version; those of frozen parameters were before
    marks: Future[dict[str, str]]

    def wait(self) -> "Snapshot":
        """Wait until all shards are copied and the devices' arrays may be donated."""
        for shard in self.owned + self.others:
            shard.copy.result()
        return self

    @property
    def nbytes(self) -> int:
        """Return the bytes of `owned`."""
        return sum(shard.nbytes for shard in self.owned)

    @property
    def frozen(self) -> frozenset[str]:
        """Return the paths of the parameters that later versions have too."""
        return frozenset(spec.path for spec in self.tensors if spec.frozen)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Wait for the fingerprints of the whole version's arrays."""
        return self.marks.result()

    @property
    def checksum(self) -> str:
        """Return the checksum of the whole version's contents, the same on any mesh."""
        return fingerprint_version(self.fingerprints)

    def params(self, like: Params) -> Params:
        """Return weights on devices, sharded and typed as `like` (WeightsError: an index range is missing here)."""
        held: dict[str, list[HostShard]] = {}
        for shard in self.owned + self.others:
            held.setdefault(shard.tensor, []).append(shard)

        def put(path: Any, leaf: jax.Array) -> jax.Array:
            shards = held.get(name := path_name(path), [])
            whole = _assemble(f"version {self.version}, {name}", shards, leaf.shape, leaf.sharding)
            return whole.astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(put, like)


def take(
    params: Params,
    version: int,
    marks: Callable[[], dict[str, str]],
    *,
    segments: NextSegment | None,
    frozen: Collection[str] = (),
    before: Snapshot | None = None,
    unrounded: Collection[str] = (),
    rounded: Mapping[str, ArrayLease] = {},
) -> Snapshot:
    """Start copying this process's shards of the weights to the host.

    The devices' arrays may be donated when `Snapshot.wait` returns.

    Args:
        marks: function that waits for their fingerprints.
        segments: source of shared memory that other processes of this host can map; ordinary memory is used if there
            is too little, or if it is None.
        frozen: paths of the parameters that no update changes.
        before: an older version of the same trainer, whose copies of frozen parameters are used again.
        unrounded: paths of the parameters that no codec may round.
        rounded: by path, what is published as rounded to another type, in arrays that nobody overwrites; not the
            frozen ones of `before`, which have their types there.
    """
    leaves = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]]
    named = [(name, rounded[name].array if name in rounded else leaf) for name, leaf in leaves]
    there = () if before is None else (*before.owned, *before.others)
    copies = {(shard.tensor, shard.index_range): shard for shard in there if shard.tensor in frozen}
    owned, others = [], []
    for turn, (name, leaf) in enumerate(named):
        mine = dict(owned_shards(leaf, turn))
        here = {index_range_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        owned += [(name, index_range, part) for index_range, part in mine.items()]
        others += [(name, index_range, part) for index_range, part in here.items() if index_range not in mine]
    known = [[copies[shard[:2]] for shard in shards if shard[:2] in copies] for shards in (owned, others)]
    owned, others = ([shard for shard in shards if shard[:2] not in copies] for shards in (owned, others))
    dtypes = {} if before is None else {spec.path: spec.dtype for spec in before.tensors if spec.path in frozen}
    owned.sort(key=lambda shard: -shard[2].nbytes)  # order of sending
    for _, _, part in owned + others:
        part.copy_to_host_async()
    pool = ThreadPoolExecutor(_COPIES + 1, "copy")  # one waits for the fingerprints
    found = pool.submit(marks)
    copied, rest = (_copy(*which, pool, rounded) for which in ((owned, segments), (others, None)))
    pool.shutdown(wait=False)
    specs = tuple(
        TensorSpec(name, tuple(leaf.shape), dtypes.get(name, leaf.dtype.name), name in frozen, name in unrounded)
        for name, leaf in named
    )
    nbytes = sum(shard.nbytes for shard in copied)
    return Snapshot(version, specs, (*copied, *known[0]), (*rest, *known[1]), nbytes, found)


def _copy(
    parts: Sequence[tuple[str, IndexRange, jax.Array]],
    segments: NextSegment | None,
    pool: ThreadPoolExecutor,
    rounded: Mapping[str, ArrayLease],
) -> tuple[HostShard, ...]:
    """Start copying; `rounded` arrays in the memory of this host stay where they are, unless they are to be shared."""
    in_place = [segments is None and tensor in rounded and on_this_host(part) for tensor, _, part in parts]
    offsets, end = [], 0
    for (_, _, part), stays in zip(parts, in_place, strict=True):
        offsets.append(end)
        end += 0 if stays else -(-part.nbytes // ALIGNMENT) * ALIGNMENT

    def memory() -> tuple[SharedSegment | None, np.ndarray]:
        segment = segments.take(end) if segments is not None and end else None
        return segment, BUFFERS.empty((end,), np.uint8) if segment is None else segment.buffer

    def copy(index_range: IndexRange, part: jax.Array, offset: int, lease: ArrayLease | None) -> np.ndarray:
        segment, buffer = kept.result()
        array = buffer[offset : offset + part.nbytes].view(part.dtype).reshape(shape_of(index_range))
        if segment is None:
            np.copyto(as_unsigned(array), as_unsigned(np.asarray(part)))
        else:
            segment.write(np.ascontiguousarray(part), offset)  # faster than the mapping: its pages are new
        del lease  # later versions may overwrite `part` from here on
        return array

    def start(tensor: str, index_range: IndexRange, part: jax.Array, offset: int, stays: bool) -> HostShard:
        if stays:
            there = pool.submit(host_view, part, rounded[tensor])
        else:
            there = pool.submit(copy, index_range, part, offset, rounded.get(tensor))
        return HostShard(tensor, index_range, part.nbytes, offset, kept, there)

    kept = pool.submit(memory)
    return tuple(start(*part, offset, stays) for part, offset, stays in zip(parts, offsets, in_place, strict=True))


def _assemble(
    name: str, shards: Sequence[HostShard], shape: Sequence[int], sharding: jax.sharding.Sharding
) -> jax.Array:
    arrays = []
    for index_range, devices in needed_index_ranges(sharding, shape).items():
        shard = next((shard for shard in shards if within(index_range, shard.index_range)), None)
        if shard is None:
            raise WeightsError(f"{name}: index range {index_range} is not in this process's copy")
        part = shard.array[(*slices(index_range, shard.index_range), ...)]
        arrays += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)
