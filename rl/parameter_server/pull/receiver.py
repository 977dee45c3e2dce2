"""The worker's side: a version as arrays on this process's devices, moving only the index ranges that they need.

An index range is read from the shard servers of the parameter server, cut where the trainer's shards end, or from
another worker that needed the same one and has it. Shared memory is mapped, not copied. What came over a connection
and is frozen is kept, and not read again. Everything is verified twice: the bytes of each index range as they arrive,
and the contents of each tensor on the devices, against the fingerprint that the trainer's devices computed.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from axlearn_like.checkpoint.plain.plain_arrays import StackEntries
from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import path_name
from mesh.programs.interruptible import map_in_threads
from rl.parameter_server.codecs import get_codec
from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import digest_of, fingerprints
from rl.parameter_server.index_ranges import needed_index_ranges
from rl.parameter_server.manifest import Manifest
from rl.parameter_server.pull.fetch import Fetch, HeldPart, parts_by_server, place
from rl.parameter_server.store.shard_server import LocalShardServer, ReadOptions, ShardId, ShardReader
from rl.parameter_server.transport.shared_memory import SharedSegment, host_identity
from rl.protocol.messages import PullStats

_PAUSE = 0.2  # seconds between attempts
_STREAMS = 2  # connections to each shard server: one receives while the data of the other is verified


class VersionSource(Protocol):
    """A receiver as a prefetcher uses it: of one process, or of several together."""

    @property
    def directory(self) -> Directory: ...
    @property
    def stats(self) -> PullStats: ...
    def pull(self, version: int, timeout: float = 0.0) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Role of a worker's process in the peer-to-peer broadcast."""

    name: str
    endpoint: str  # address where it serves, as text
    shard_server: LocalShardServer  # store that it serves from
    connect: Callable[[str], ShardReader]  # connects to the shard server of the peer at an endpoint


class Receiver:
    """Receiver of versions as arrays like the given ones: nested dicts of leaves with shape, dtype and sharding.

    Of a leaf that is an `EntriesStruct` come `StackEntries`.
    """

    def __init__(
        self,
        directory: Directory,
        servers: Sequence[ShardReader],
        like: Params,
        *,
        codec: str = "raw",
        shared_memory: bool = True,
        verify: bool = True,
        peer: Peer | None = None,
    ):
        """Connect to no server yet.

        Args:
            codec: encoding of the data (see codecs).
            verify: check fingerprints on the devices; if the codec is approximate, of unrounded tensors alone,
                whichever way the others came.
        """
        self.directory, self._servers = directory, list(servers)
        self._codec, self._codec_text = get_codec(codec), codec
        self._host = host_identity() if shared_memory else None
        self._verify, self._peer = verify, peer
        self._like = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]}
        self._tree = jax.tree.structure(like)
        self._needed = {name: needed_index_ranges(leaf.sharding, leaf.shape) for name, leaf in self._like.items()}
        self._wanted: list[ShardId] = [
            (name, index_range) for name, index_ranges in self._needed.items() for index_range in index_ranges
        ]
        self._dtypes = {name: np.dtype(leaf.dtype) for name, leaf in self._like.items()}
        self._shard_set = digest_of(repr((self._wanted, self._dtypes)).encode())
        # Key and index ranges of the version pulled last.
        self._held: tuple[int, dict[ShardId, np.ndarray]] | None = None
        self._frozen: dict[ShardId, np.ndarray] = {}  # frozen shards of the last pulled version
        self._frozen_marks: dict[str, str] = {}  # fingerprints of their tensors
        self._segments: dict[str, SharedSegment] = {}
        self._source: str | None = None  # endpoint of the peer that was read last; None: the parameter server
        self._liars: set[str | None] = set()  # endpoints of peers whose contents were wrong
        self.stats = PullStats()  # counters of the last pull

    @property
    def approximations(self) -> tuple[str, ...]:
        """Return tags for rollouts generated with these weights: the codec, unless it is bit-exact."""
        return () if self._codec.lossless else (f"{self._codec.name}-weights",)

    def pull(self, version: int, timeout: float = 0.0) -> Params:
        """Return a version on the devices, within `timeout` seconds (WeightsError: late, damaged, or other shapes)."""
        end = time.monotonic() + timeout
        while True:
            manifest = self.directory.manifest(version, max(0.0, end - time.monotonic()))
            began = time.monotonic()
            try:
                params = self.fetch(manifest, max(0.0, end - time.monotonic()))
            except VersionGone:  # a server was restarted: the trainer is about to publish again
                if time.monotonic() >= end:
                    raise
                time.sleep(_PAUSE)
                continue
            try:
                self.check(manifest, params)
            except WeightsError:
                if self.stats.source == "server" or time.monotonic() >= end:
                    raise
                continue  # another source may answer
            self.stats.seconds = time.monotonic() - began
            return params

    def fetch(self, manifest: Manifest, timeout: float = 0.0) -> Params:
        """Return the arrays of a version with this process's slices on its devices; `check` is still to come.

        Runs no program on the devices, so it may be called beside programs of several processes. `timeout`: seconds to
        wait for a source to read from.

        Raises:
            VersionGone: a server has lost it. WeightsError: damaged, or of other shapes or types than the policy's.
        """
        self._check_types(manifest)
        return self._place(self._fetch(manifest, time.monotonic() + timeout))

    def check(self, manifest: Manifest, params: Params) -> None:
        """Check the contents on the devices; all processes that share the arrays must call this together.

        Contents that a peer has sent and that are wrong are offered to nobody, and no more is read from that peer.

        Raises:
            WeightsError: they are not what the trainer had; in all processes alike.
        """
        try:
            self._check(manifest, params)
        except WeightsError:
            self._held, self._frozen, self._frozen_marks = None, {}, {}
            if self._peer is not None:
                self._peer.shard_server.drop([manifest.key])
                self._liars |= {self._source} - {None}
            raise

    # ---- internals

    def _check(self, manifest: Manifest, params: Params) -> None:
        if not self._verify:
            return
        same = {spec.path for spec in manifest.tensors if self._codec.lossless or spec.unrounded}
        leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        for name, found in fingerprints({name: leaves[name] for name in leaves if name in same}).items():
            if found != manifest.fingerprints[name]:
                raise WeightsError(
                    f"version {manifest.version}: {name} on this worker's devices is not what the trainer had: "
                    f"fingerprint {found}, expected {manifest.fingerprints[name]}"
                )

    def _fetch(self, manifest: Manifest, end: float) -> dict[ShardId, np.ndarray]:
        self.stats = PullStats(checksum=manifest.checksum)
        bases = {} if self._held is None else self._held[1]
        fetch = Fetch(manifest.key, self._options(manifest), bases, self._segments, self.stats)
        held = self._unchanged(manifest)
        wanted = [name for name in self._wanted if name not in held]
        if self._peer is None:
            self._from_server(manifest, fetch, wanted)
        else:
            self._from_anyone(manifest, fetch, wanted, held, end, self._peer)
        self.stats.needed = sum(array.nbytes for array in fetch.index_ranges.values())
        fetch.index_ranges |= held
        self._hold_frozen(manifest, fetch)
        self._segments = {name: self._segments[name] for name in fetch.mapped}
        if self._codec.needs_base:
            self._held = manifest.key, fetch.index_ranges
        return fetch.index_ranges

    def _unchanged(self, manifest: Manifest) -> dict[ShardId, np.ndarray]:
        """Return the index ranges of frozen tensors that are here already."""
        marks = manifest.fingerprints
        same = {tensor for tensor, mark in self._frozen_marks.items() if marks.get(tensor) == mark}
        return {name: array for name, array in self._frozen.items() if name[0] in same}

    def _hold_frozen(self, manifest: Manifest, fetch: Fetch) -> None:
        """Keep what is frozen, unless it is mapped, which costs nothing."""
        frozen = set() if fetch.mapped else {spec.path for spec in manifest.tensors if spec.frozen}
        self._frozen = {name: array for name, array in fetch.index_ranges.items() if name[0] in frozen}
        self._frozen_marks = {tensor: manifest.fingerprints[tensor] for tensor in frozen}

    def _options(self, manifest: Manifest) -> ReadOptions:
        whole = self._codec.needs_base and self._held is None
        return ReadOptions(
            codec="raw" if whole else self._codec_text,
            base=None if self._held is None else self._held[0],
            unrounded=() if self._codec.lossless else tuple(one.path for one in manifest.tensors if one.unrounded),
            host=self._host,
        )

    def _from_server(self, manifest: Manifest, fetch: Fetch, wanted: Sequence[ShardId]) -> None:
        by_server = parts_by_server(manifest, wanted, self._dtypes)
        self._read_all([(self._servers[number], parts) for number, parts in by_server.items()], fetch)

    def _from_anyone(
        self,
        manifest: Manifest,
        fetch: Fetch,
        wanted: Sequence[ShardId],
        held: dict[ShardId, np.ndarray],
        end: float,
        peer: Peer,
    ) -> None:
        """Read from the source that the directory assigns; if it fails, from the next. `held` is offered too."""
        parts = [HeldPart(tensor, index_range, index_range, self._dtypes[tensor]) for tensor, index_range in wanted]
        while True:
            left = end - time.monotonic()
            granted = self.directory.grant(peer.name, peer.endpoint, self._shard_set, manifest.version, max(0.0, left))
            if granted is None:
                raise WeightsError(
                    f"version {manifest.version}: no free source to read from for {max(0.0, left):.0f} s"
                )
            grant, source = granted
            try:
                if source in self._liars:
                    raise WeightsError(f"{source} has sent other contents than the trainer's")
                self._source = source
                if source is None:
                    self._from_server(manifest, fetch, wanted)
                else:
                    self._read_all([(peer.connect(source), parts)], fetch)
                    self.stats.source = "worker"
            except Exception:  # a peer may send anything
                self.directory.failed(grant, source is not None)
                if source is None:
                    raise
                continue
            self._offer(manifest, {**fetch.index_ranges, **held}, peer)
            self.directory.done(grant, True)
            return

    def _offer(self, manifest: Manifest, index_ranges: dict[ShardId, np.ndarray], peer: Peer) -> None:
        """Hold the version for peers, and the previous one as a base for deltas."""
        before = peer.shard_server.store.versions()[-1:]
        peer.shard_server.store.add(manifest.key, [(*name, array) for name, array in index_ranges.items()])
        peer.shard_server.keep({manifest.key, *before})

    def _read_all(self, work: Sequence[tuple[ShardReader, Sequence[HeldPart]]], fetch: Fetch) -> None:
        shares = [(server, share) for server, parts in work for share in _shares(parts, _STREAMS)]
        map_in_threads(lambda one: fetch.read(*one), [one for one in shares if one[1]], len(shares))

    def _place(self, index_ranges: dict[ShardId, np.ndarray]) -> Params:
        def put(name: str, leaf: Any) -> jax.Array | StackEntries:
            needed = self._needed[name]
            return place({index_range: index_ranges[name, index_range] for index_range in needed}, needed, leaf)

        return jax.tree.unflatten(self._tree, [put(name, leaf) for name, leaf in self._like.items()])

    def _check_types(self, manifest: Manifest) -> None:
        theirs = {spec.path: f"{spec.dtype}{list(spec.shape)}" for spec in manifest.tensors}
        ours = {name: f"{self._dtypes[name].name}{list(leaf.shape)}" for name, leaf in self._like.items()}
        if theirs != ours:
            name = min(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
            raise WeightsError(
                f"version {manifest.version}: {name} is {theirs.get(name, 'not there')} at the parameter server and "
                f"{ours.get(name, 'not there')} in this worker's policy; are both of one run?"
            )


def _shares(parts: Sequence[HeldPart], count: int) -> list[list[HeldPart]]:
    """Divide parts into shares of about as many bytes, the largest first."""
    shares: list[list[HeldPart]] = [[] for _ in range(count)]
    loads = [0] * count
    for part in sorted(parts, key=lambda part: -part.nbytes):
        least = loads.index(min(loads))
        shares[least].append(part)
        loads[least] += part.nbytes
    return shares
