"""The worker's side: a version as arrays on this process's devices, moving only the boxes that they need.

What a box is read from: the data shards of the parameter server, cut where the trainer's pieces end; or another worker
that wanted the same and has it. Shared memory is mapped, not copied. Everything is verified twice: the bytes of each
box as they arrive, and the contents of each tensor on the devices, by the fingerprint that the trainer's devices gave.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from axlearn_like.layers.base import Params
from rl.parameter_server.codecs import get_codec
from rl.parameter_server.digest import digest_of
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import fingerprints, path_name
from rl.parameter_server.index_ranges import needed_boxes
from rl.parameter_server.manifest import Manifest
from rl.parameter_server.pull.fetch import Moved, Part, Reading, parts_by_shard
from rl.parameter_server.store.shard_server import Holder, HolderLink, ReadOptions, Wanted
from rl.parameter_server.transport.shared_memory import Segment, host_identity

_PAUSE = 0.2  # seconds between attempts


class VersionDirectory(Protocol):
    """What a puller asks of the directory."""

    def latest(self) -> int: ...
    def newer(self, version: int, timeout: float = 0.0) -> int: ...
    def manifest(self, version: int, timeout: float = 0.0) -> Manifest: ...
    def grant(
        self, worker: str, endpoint: str, share: str, version: int, timeout: float = 0.0
    ) -> tuple[int, str | None] | None: ...
    def done(self, grant: int, serves: bool) -> None: ...
    def failed(self, grant: int, source_is_dead: bool) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Relaying:
    """How a worker's process takes part in serving others.

    Attributes:
        name: of the process.
        endpoint: where it serves, as text.
        holder: what it serves from.
        link: makes a link to the holder at an endpoint.
    """

    name: str
    endpoint: str
    holder: Holder
    link: Callable[[str], HolderLink]


class Puller:
    """Pulls versions as arrays like those given: nested dicts of what has a shape, a dtype and a sharding."""

    def __init__(
        self,
        directory: VersionDirectory,
        shards: Sequence[HolderLink],
        like: Params,
        *,
        codec: str = "raw",
        key_every: int = 0,
        shared_memory: bool = True,
        verify: bool = True,
        relaying: Relaying | None = None,
        streams: int = 2,
    ):
        """Args:
        codec: how boxes travel (see codecs).
        key_every: versions that are a multiple of it travel whole, whatever the codec; 0: none.
        verify: contents by fingerprint on the devices, where the codec is lossless and the type the trainer's.
        streams: connections to each holder at a time: while what came by one is verified, more comes by the other.
        """
        self.directory, self._shards = directory, list(shards)
        self._codec, self._key_every, self._streams = get_codec(codec), key_every, streams
        self._host = host_identity() if shared_memory else None
        self._verify, self._relaying = verify, relaying
        self._threads = ThreadPoolExecutor(streams * max(1, len(self._shards)), "pull")
        self._like = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]}
        self._tree = jax.tree.structure(like)
        self._needed = {name: needed_boxes(leaf.sharding, leaf.shape) for name, leaf in self._like.items()}
        self._wanted: list[Wanted] = [(name, box) for name, boxes in self._needed.items() for box in boxes]
        self._dtypes = {name: np.dtype(leaf.dtype) for name, leaf in self._like.items()}
        self._share = digest_of(repr((self._wanted, self._dtypes)).encode())
        self._held: tuple[int, dict[Wanted, np.ndarray]] | None = None  # key and boxes of the version pulled last
        self._segments: dict[str, Segment] = {}
        self.moved = Moved()  # by the last pull

    @property
    def approximations(self) -> tuple[str, ...]:
        """Tags for rollouts drawn with what was pulled: the codec, if arrays are not the trainer's to the bit."""
        return () if self._codec.lossless else (f"{self._codec.name}-weights",)

    def pull(self, version: int, timeout: float = 0.0) -> Params:
        """The arrays, placed. Waits up to `timeout` seconds for the version and for all of its pieces.

        Raises:
            WeightsError: not to be had in time, damaged, or of other shapes than the policy's.
        """
        end = time.monotonic() + timeout
        while True:
            manifest = self.directory.manifest(version, max(0.0, end - time.monotonic()))
            began = time.monotonic()
            self._check_shapes(manifest)
            try:
                params = self._place(self._fetch(manifest, end))
            except VersionGone:  # a shard was restarted: the trainer is about to publish again
                if time.monotonic() >= end:
                    raise
                time.sleep(_PAUSE)
                continue
            self._check_contents(manifest, params)
            self.moved.seconds = time.monotonic() - began
            return params

    # ---- parts

    def _fetch(self, manifest: Manifest, end: float) -> dict[Wanted, np.ndarray]:
        self.moved = Moved(checksum=manifest.checksum)
        bases = {} if self._held is None else self._held[1]
        reading = Reading(manifest.key, self._options(manifest), bases, self._segments, self.moved)
        if self._relaying is None:
            self._from_server(manifest, reading)
        else:
            self._from_anyone(manifest, reading, end, self._relaying)
        self.moved.needed = sum(array.nbytes for array in reading.boxes.values())
        self._segments = {name: self._segments[name] for name in reading.mapped}
        if self._codec.needs_base:
            self._held = manifest.key, reading.boxes
        return reading.boxes

    def _options(self, manifest: Manifest) -> ReadOptions:
        whole = self._codec.needs_base and (
            self._held is None or (self._key_every and manifest.version % self._key_every == 0)
        )
        casts = {
            spec.path: self._dtypes[spec.path].name
            for spec in manifest.tensors
            if spec.dtype != self._dtypes[spec.path].name
        }
        return ReadOptions(
            codec="raw" if whole else self._codec.name,
            base=None if whole or self._held is None else self._held[0],
            dtype=casts,
            host=self._host,
        )

    def _from_server(self, manifest: Manifest, reading: Reading) -> None:
        by_shard = parts_by_shard(manifest, self._wanted, self._dtypes)
        self._read_all([(self._shards[number], parts) for number, parts in by_shard.items()], reading)

    def _from_anyone(self, manifest: Manifest, reading: Reading, end: float, relaying: Relaying) -> None:
        """From whom the directory says; from the next, if that one fails."""
        parts = [Part(tensor, box, box, self._dtypes[tensor]) for tensor, box in self._wanted]
        while True:
            left = end - time.monotonic()
            granted = self.directory.grant(
                relaying.name, relaying.endpoint, self._share, manifest.version, max(0.0, left)
            )
            if granted is None:
                raise WeightsError(
                    f"version {manifest.version}: no place to read from for {max(0.0, left):.0f} s, holders are busy"
                )
            grant, source = granted
            try:
                if source is None:
                    self._from_server(manifest, reading)
                else:
                    self._read_all([(relaying.link(source), parts)], reading)
                    self.moved.by = "worker"
            except WeightsError:
                self.directory.failed(grant, source is not None)
                if source is None:
                    raise
                continue
            self._offer(manifest, reading, relaying)
            self.directory.done(grant, True)
            return

    def _offer(self, manifest: Manifest, reading: Reading, relaying: Relaying) -> None:
        """Hold it for others, and the one before as a base."""
        before = relaying.holder.store.versions()[-1:]
        relaying.holder.store.add(manifest.key, [(*name, array) for name, array in reading.boxes.items()])
        relaying.holder.keep({manifest.key, *before})

    def _read_all(self, work: Sequence[tuple[HolderLink, Sequence[Part]]], reading: Reading) -> None:
        shares = [(link, parts[n :: self._streams]) for link, parts in work for n in range(self._streams)]
        for done in [self._threads.submit(reading.read, link, share) for link, share in shares if share]:
            done.result()

    def _place(self, boxes: dict[Wanted, np.ndarray]) -> Params:
        def put(name: str, leaf: Any) -> jax.Array:
            arrays = [
                jax.device_put(boxes[name, box], device)
                for box, devices in self._needed[name].items()
                for device in devices
            ]
            return jax.make_array_from_single_device_arrays(tuple(leaf.shape), leaf.sharding, arrays)

        return jax.tree.unflatten(self._tree, [put(name, leaf) for name, leaf in self._like.items()])

    def _check_shapes(self, manifest: Manifest) -> None:
        theirs = {spec.path: spec.shape for spec in manifest.tensors}
        ours = {name: tuple(leaf.shape) for name, leaf in self._like.items()}
        if theirs != ours:
            name = min(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
            raise WeightsError(
                f"version {manifest.version}: {name} is {theirs.get(name, 'not there')} at the parameter server and "
                f"{ours.get(name, 'not there')} in this worker's policy; are both of one run?"
            )

    def _check_contents(self, manifest: Manifest, params: Params) -> None:
        if not (self._verify and self._codec.lossless):
            return
        ours = {spec.path for spec in manifest.tensors if spec.dtype == self._dtypes[spec.path].name}
        found = fingerprints(params)
        for name in ours:
            if found[name] != manifest.fingerprints[name]:
                raise WeightsError(
                    f"version {manifest.version}: {name} on this worker's devices is not what the trainer had: "
                    f"fingerprint {found[name]}, expected {manifest.fingerprints[name]}"
                )
