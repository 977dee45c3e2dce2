"""The trainer's side: every process pushes the shards it owns, from its own memory, and commits the version.

Copying to the host is all that the next update has to wait for; what follows runs beside it on a thread.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from axlearn_like.layers.base import Params
from rl.parameter_server.errors import PublishAborted, VersionGone, WeightsError
from rl.parameter_server.fingerprint import begin_fingerprints, digest_of
from rl.parameter_server.manifest import Commit, Shard
from rl.parameter_server.push.snapshot import HostShard, Snapshot, take
from rl.parameter_server.store.shard_server import ShardServer
from rl.parameter_server.transport.shared_memory import Segment, host_identity

_ATTEMPTS = 5  # to publish one version, each of which a restart of the server may end
_PATIENCE = 600.0  # seconds that other processes of the trainer may lag behind
_CHUNK = 16 << 20  # bytes that one request carries, or one shard if it is larger
_STREAMS = 2  # requests to a server at a time: while it verifies one, the next is on its way


class VersionRegister(Protocol):
    """What a publisher asks of the directory."""

    def open(self, version: int, pusher: str, processes: int) -> int: ...
    def commit(self, commit: Commit) -> bool: ...
    def outcome(self, key: int, timeout: float = 0.0) -> bool | list[int]: ...


class Publisher:
    """One for each trainer process. `process` of `processes`; all of one trainer know each other by `pusher`."""

    def __init__(
        self,
        directory: VersionRegister,
        servers: Sequence[ShardServer],
        *,
        pusher: str | None = None,
        process: int = 0,
        processes: int = 1,
        shared_memory: bool = True,
    ):
        if pusher is None and processes > 1:
            raise WeightsError("publisher: the processes of a trainer need one `pusher` name, another for every start")
        self._directory, self._servers = directory, list(servers)
        self._pusher = pusher or secrets.token_hex(8)
        self._process, self._processes = process, processes
        self._shared_memory = shared_memory

    def copy(self, params: Params, version: int) -> Snapshot:
        """Copy the part of a version that this process owns; the arrays may be donated afterwards."""
        return self._take(params, version).wait()

    def publish_async(
        self, params: Params, version: int, then: Callable[[Snapshot], None] = lambda snapshot: None
    ) -> "Push":
        """Publish on a thread; `then` is called when it is done.

        All processes of the trainer call this in the same order, since the contents' fingerprints are computed by all
        of them together. The arrays may be given up when `Push.snapshot` returns.
        """
        return Push(self._take(params, version), self.publish, then)

    def republish(self, snapshot: Snapshot) -> "Push":
        """Publish, on a thread, what was copied before."""
        return Push(snapshot, self.publish, lambda snapshot: None)

    def publish(self, snapshot: Snapshot) -> None:
        """Push this process's shards and commit. With the last process's commit the version is there for all to read.

        May be repeated: what is published already, with the same contents, stays as it is.

        Raises:
            WeightsError: the server refuses the version, or is gone for longer than the links' patience.
        """
        for attempt in range(_ATTEMPTS):
            key = self._directory.open(snapshot.version, self._pusher, self._processes)
            try:
                if self._directory.commit(self._push(snapshot, key)) or self._wait_for_others(snapshot.version, key):
                    return
            except PublishAborted:
                if attempt == _ATTEMPTS - 1:
                    raise

    def _take(self, params: Params, version: int) -> Snapshot:
        return take(params, version, begin_fingerprints(params), shared=self._shared_memory)

    def _wait_for_others(self, version: int, key: int) -> bool:
        """Until the last process has committed; False if the attempt came to nothing and has to be made again."""
        began = time.monotonic()
        while not isinstance(outcome := self._directory.outcome(key, 5.0), bool):
            if (waited := time.monotonic() - began) > _PATIENCE:
                raise WeightsError(
                    f"version {version}: waited {waited:.0f} s for the commits of trainer processes {outcome} "
                    f"(this is process {self._process} of {self._processes})"
                )
        return outcome

    def _push(self, snapshot: Snapshot, key: int) -> Commit:
        shards, incarnations = [], {}
        for number, mine in self._assign(snapshot.owned).items():
            server = self._servers[number]
            incarnations[number] = server.incarnation()
            digests = self._give(server, key, snapshot.memory, mine) or self._send(server, key, mine)
            shards += [Shard(p.tensor, p.index_range, mark, number) for p, mark in zip(mine, digests, strict=True)]
        return Commit(
            version=snapshot.version,
            key=key,
            process=self._process,
            processes=self._processes,
            tensors=snapshot.tensors,
            shards=tuple(shards),
            fingerprints=snapshot.fingerprints,
            incarnations=incarnations,
        )

    def _send(self, server: ShardServer, key: int, shards: Sequence[HostShard]) -> list[str]:
        """Write shards to a server; their digests."""

        def send(chunk: Sequence[HostShard]) -> list[str]:
            digests = [digest_of(shard.array) for shard in chunk]
            server.write(
                key, [(p.tensor, p.index_range, p.array, mark) for p, mark in zip(chunk, digests, strict=True)]
            )
            return digests

        first, *others = _chunks(shards)
        if not others:
            return send(first)
        with ThreadPoolExecutor(_STREAMS, "push") as pool:
            return [digest for digests in pool.map(send, [first, *others]) for digest in digests]

    def _give(self, server: ShardServer, key: int, memory: Segment | None, shards: Sequence[HostShard]) -> list[str]:
        """Let a server on this host map the snapshot's memory. Return the shards' digests, or [] if it cannot."""
        if memory is None or server.host() != host_identity():
            return []
        digests = [digest_of(shard.array) for shard in shards]
        entries = [
            (shard.tensor, shard.index_range, shard.array.dtype.name, shard.offset, digest)
            for shard, digest in zip(shards, digests, strict=True)
        ]
        try:
            server.adopt(key, memory.name, entries)
        except VersionGone:
            return []  # pushed before, and dropped by its adopter since
        return digests

    def _assign(self, shards: Sequence[HostShard]) -> dict[int, list[HostShard]]:
        """Pieces to shard servers: the largest first, each to the server with the fewest bytes so far."""
        loads = [0] * len(self._servers)
        assigned: dict[int, list[HostShard]] = {}
        for shard in sorted(shards, key=lambda shard: -shard.nbytes):
            number = min(range(len(loads)), key=lambda n: (loads[n], (n - self._process) % len(loads)))
            loads[number] += shard.nbytes
            assigned.setdefault(number, []).append(shard)
        return assigned


class Push:
    """One version on its way, on a thread of its own."""

    def __init__(self, snapshot: Snapshot, publish: Callable[[Snapshot], None], then: Callable[[Snapshot], None]):
        self._snapshot = snapshot
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(publish, then), daemon=True).start()

    def snapshot(self) -> Snapshot:
        """What was copied, as soon as all of it is."""
        return self._snapshot.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is published within so many seconds (None: however long that takes); raises what went wrong."""
        ended = self._ended.wait(timeout)
        if self._error is not None:
            raise self._error
        return ended

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def _run(self, publish: Callable[[Snapshot], None], then: Callable[[Snapshot], None]) -> None:
        try:
            publish(self._snapshot)
            then(self._snapshot)
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            self._ended.set()


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
