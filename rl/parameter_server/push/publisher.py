"""The trainer's side: every process pushes the shards that it owns, from its own memory, and commits the version.

The next update only has to wait for the copy to the host; everything after it runs on a thread. Frozen parameters are
pushed once: servers keep them for later versions (`ShardServer.link`).
"""

import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import without
from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import PublishAborted, VersionGone, WeightsError
from rl.parameter_server.fingerprint import begin_fingerprints, digest_of
from rl.parameter_server.manifest import Commit, Shard
from rl.parameter_server.push.deltas import encode_deltas, shard_id
from rl.parameter_server.push.next_segment import NextSegment
from rl.parameter_server.push.push import Push
from rl.parameter_server.push.rounded_copies import RoundedCopies, rounded_dtypes
from rl.parameter_server.push.snapshot import HostShard, Snapshot, take
from rl.parameter_server.store.shard_server import ShardId, ShardServer
from rl.parameter_server.transport.shared_memory import SharedSegment, host_identity

_ATTEMPTS = 5  # attempts per version; a server restart consumes one
_COMMIT_TIMEOUT = 600.0  # seconds to wait for the other processes of the trainer
_CHUNK = 16 << 20  # bytes per request, or one shard if it is larger
_STREAMS = 2  # concurrent requests to a server: it verifies one while it receives the next


class _Linkable(NamedTuple):
    """Frozen shards that a server holds under a key."""

    incarnation: str
    key: int
    shards: frozenset[ShardId]


class _Published(NamedTuple):
    """Shards that servers hold of the version published last, bases of the next one's deltas."""

    incarnations: dict[int, str]
    key: int
    shards: dict[int, dict[ShardId, HostShard]]


@dataclasses.dataclass(frozen=True, slots=True)
class Pusher:
    """One process of a trainer."""

    trainer: str  # name of this start of the trainer, another one for every start and the same in all its processes
    process: int = 0
    processes: int = 1


class Publisher:
    """Publisher of one trainer process."""

    def __init__(
        self,
        directory: Directory,
        servers: Sequence[ShardServer],
        *,
        pusher: Pusher | None = None,
        shared_memory: bool = True,
        deltas: bool = False,
        unrounded: Collection[str] = (),
        dtypes: Callable[[str, np.dtype], np.dtype] = lambda path, dtype: dtype,
    ):
        """Store the settings.

        Args:
            pusher: this process; None: the only one of its trainer.
            shared_memory: copy to where other processes of this host can map it.
            deltas: send what has changed since the version that was published last, in codec `delta`; whole shards
                where a server has lost that. Keeps the copy of that version.
            unrounded: paths of the parameters that no codec may round.
            dtypes: from a parameter's path and type to the type that it is published in. float32 may become bfloat16,
                rounded to nearest even as `jnp.astype`; all else stays.
        """
        self._directory, self._servers, self._pusher = directory, list(servers), pusher or Pusher(secrets.token_hex(8))
        self._shared_memory, self._dtypes, self._unrounded = shared_memory, dtypes, frozenset(unrounded)
        self._linkable: dict[int, _Linkable] = {}  # server -> version that can be linked
        self._deltas = deltas
        self._published: _Published | None = None
        self._rounded, self._segments = RoundedCopies(), NextSegment()

    def copy(
        self, params: Params, version: int, *, frozen: Collection[str] = (), before: Snapshot | None = None
    ) -> Snapshot:
        """Copy this process's shards; arrays may be donated then. `frozen`, `before`: see `publish_async`."""
        return self._take(params, version, frozen, before).wait()

    def publish_async(
        self,
        params: Params,
        version: int,
        then: Callable[[Snapshot], None] = lambda snapshot: None,
        *,
        frozen: Collection[str] = (),
        before: Snapshot | None = None,
    ) -> "Push":
        """Publish on a thread; call `then` when it is done.

        All processes of the trainer must call this in the same order, since fingerprints are computed collectively. The
        arrays may be donated when `Push.snapshot` returns.

        Args:
            then: called with what was published.
            frozen: paths of the parameters that no update changes.
            before: an older version of this trainer: its copies of frozen parameters are used again.
        """
        return Push(self._take(params, version, frozen, before), self.publish, then, self._segments.prepare)

    def republish(self, snapshot: Snapshot) -> "Push":
        """Publish an existing snapshot again, on a thread."""
        return Push(snapshot, self.publish, lambda snapshot: None, lambda: None)

    def publish(self, snapshot: Snapshot) -> None:
        """Push this process's shards and commit. The last process's commit makes the version visible to all.

        Idempotent: a version that is published already, with the same contents, stays as it is.

        Raises:
            WeightsError: the server refuses the version, or is unreachable for longer than the clients' retry timeout.
        """
        for attempt in range(_ATTEMPTS):
            key = self._directory.open(snapshot.version, self._pusher.trainer, self._pusher.processes)
            try:
                commit = self._push(snapshot, key)
                if self._directory.commit(commit) or self._wait_for_others(snapshot.version, key):
                    self._published = self._base(snapshot, commit) if self._deltas else None
                    return
            except PublishAborted:
                if attempt == _ATTEMPTS - 1:
                    raise

    def _take(
        self, params: Params, version: int, frozen: Collection[str] = (), before: Snapshot | None = None
    ) -> Snapshot:
        dtypes = rounded_dtypes(params, self._dtypes)
        trained = params if before is None else without(params, frozen)
        rounded, marks = begin_fingerprints(trained, dtypes, self._rounded.spare())

        def all_marks() -> dict[str, str]:
            same = {} if before is None else {name: before.fingerprints[name] for name in frozen}
            return {**same, **marks()}

        return take(
            params,
            version,
            all_marks,
            segments=self._segments if self._shared_memory else None,
            frozen=frozen,
            before=before,
            unrounded=self._unrounded,
            rounded=self._rounded.lend(rounded),
        )

    def _wait_for_others(self, version: int, key: int) -> bool:
        """Wait until the last process has committed; return False if the attempt was aborted."""
        began = time.monotonic()
        while not isinstance(outcome := self._directory.outcome(key, 5.0), bool):
            if (waited := time.monotonic() - began) > _COMMIT_TIMEOUT:
                raise WeightsError(
                    f"version {version}: waited {waited:.0f} s for the commits of trainer processes {outcome} "
                    f"(this is process {self._pusher.process} of {self._pusher.processes})"
                )
        return outcome

    def _push(self, snapshot: Snapshot, key: int) -> Commit:
        shards, incarnations = [], {}
        for number, mine in self._assign(snapshot.owned).items():
            server = self._servers[number]
            incarnations[number] = incarnation = server.incarnation()
            frozen = [one for one in mine if one.tensor in snapshot.frozen]
            linked = self._link(number, incarnation, key, frozen)
            rest = [one for one in mine if shard_id(one) not in linked]
            if not self._give(server, key, rest):
                self._send(number, incarnation, key, rest)
            shards += [Shard(*shard_id(one), number) for one in mine]
            self._linkable[number] = _Linkable(incarnation, key, frozenset(map(shard_id, frozen)))
        return Commit(
            version=snapshot.version,
            key=key,
            process=self._pusher.process,
            processes=self._pusher.processes,
            tensors=snapshot.tensors,
            shards=tuple(shards),
            fingerprints=snapshot.fingerprints,
            incarnations=incarnations,
        )

    def _link(self, number: int, incarnation: str, key: int, shards: Sequence[HostShard]) -> frozenset[ShardId]:
        """Let a server keep frozen shards that it has of an older version. Return those that it had."""
        known = self._linkable.get(number)
        if known is None or not shards or known.incarnation != incarnation:
            return frozenset()
        try:
            self._servers[number].link(key, known.key, list(known.shards))
        except VersionGone:
            return frozenset()
        return known.shards

    def _base(self, snapshot: Snapshot, commit: Commit) -> _Published:
        shards = {
            number: {shard_id(shard): shard for shard in mine if shard.tensor not in snapshot.frozen}
            for number, mine in self._assign(snapshot.owned).items()
        }
        return _Published(commit.incarnations, commit.key, shards)

    def _send(self, number: int, incarnation: str, key: int, shards: Sequence[HostShard]) -> None:
        """Write shards to a server."""
        server, base = self._servers[number], self._published
        if base is not None and base.incarnations.get(number) != incarnation:
            base = None
        bases = {} if base is None else base.shards.get(number, {})

        def send(chunk: Sequence[HostShard]) -> None:
            deltas, rest = encode_deltas(chunk, bases)
            if base is not None and deltas:
                try:
                    server.write_deltas(key, base.key, deltas)
                except VersionGone:
                    deltas, rest = [], chunk
            written = [(*shard_id(shard), shard.array, digest_of(shard.array)) for shard in rest]
            if written:
                server.write(key, written)

        chunks = _chunks(shards)
        if len(chunks) < 2:
            for chunk in chunks:
                send(chunk)
            return
        with ThreadPoolExecutor(_STREAMS, "push") as pool:
            list(pool.map(send, chunks))

    def _give(self, server: ShardServer, key: int, shards: Sequence[HostShard]) -> bool:
        """Let a server on this host map the memory of shards. Return False if it cannot."""
        by_memory: dict[SharedSegment, list[HostShard]] = {}
        for shard in shards:
            if shard.memory is None:
                return False
            by_memory.setdefault(shard.memory, []).append(shard)
        if not shards or server.host() != host_identity():
            return False
        try:
            for memory, held in by_memory.items():
                # `array` waits for the copy, which is all that has to be done.
                entries = [(*shard_id(one), one.array.dtype.name, one.offset) for one in held]
                server.adopt(key, memory.name, entries)
        except VersionGone:
            return False  # pushed before, and dropped by its adopter since
        return True

    def _assign(self, shards: Sequence[HostShard]) -> dict[int, list[HostShard]]:
        """Assign shards to servers: the largest first, each to the server with the fewest bytes so far."""
        loads = [0] * len(self._servers)
        assigned: dict[int, list[HostShard]] = {}
        for shard in sorted(shards, key=lambda shard: (-shard.nbytes, shard_id(shard))):  # the same for every version
            number = min(range(len(loads)), key=lambda n: (loads[n], (n - self._pusher.process) % len(loads)))
            loads[number] += shard.nbytes
            assigned.setdefault(number, []).append(shard)
        return assigned


def _chunks(shards: Sequence[HostShard]) -> list[list[HostShard]]:
    chunks: list[list[HostShard]] = []
    room = 0
    for shard in shards:
        if shard.nbytes > room or not chunks:
            chunks.append([])
            room = _CHUNK
        chunks[-1].append(shard)
        room -= shard.nbytes
    return chunks
