"""The trainer's side: every process pushes the shards that it owns, from its own memory, and commits the version.

The next update only has to wait for the copy to the host; everything after it runs on a thread.
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

_ATTEMPTS = 5  # to publish one version; a restart of the server aborts one
_COMMIT_TIMEOUT = 600.0  # seconds to wait for the other processes of the trainer
_CHUNK = 16 << 20  # bytes per request, or one shard if it is larger
_STREAMS = 2  # concurrent requests to a server: it verifies one while it receives the next


class VersionRegister(Protocol):
    """Directory as a publisher uses it."""

    def open(self, version: int, pusher: str, processes: int) -> int: ...
    def commit(self, commit: Commit) -> bool: ...
    def outcome(self, key: int, timeout: float = 0.0) -> bool | list[int]: ...


class Publisher:
    """Publisher of one trainer process, `process` of `processes`; those of one trainer share the name `pusher`."""

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
        """Copy the shards of a version that this process owns; the arrays may be donated afterwards."""
        return self._take(params, version).wait()

    def publish_async(
        self, params: Params, version: int, then: Callable[[Snapshot], None] = lambda snapshot: None
    ) -> "Push":
        """Publish on a thread; call `then` when it is done.

        All processes of the trainer must call this in the same order, since fingerprints are computed collectively. The
        arrays may be donated when `Push.snapshot` returns.
        """
        return Push(self._take(params, version), self.publish, then)

    def republish(self, snapshot: Snapshot) -> "Push":
        """Publish an existing snapshot again, on a thread."""
        return Push(snapshot, self.publish, lambda snapshot: None)

    def publish(self, snapshot: Snapshot) -> None:
        """Push this process's shards and commit. The last process's commit makes the version visible to all.

        Idempotent: a version that is published already, with the same contents, stays as it is.

        Raises:
            WeightsError: the server refuses the version, or is unreachable for longer than the clients' retry timeout.
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
        """Wait until the last process has committed; return False if the attempt was aborted."""
        began = time.monotonic()
        while not isinstance(outcome := self._directory.outcome(key, 5.0), bool):
            if (waited := time.monotonic() - began) > _COMMIT_TIMEOUT:
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
        """Write shards to a server; return their digests."""

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
        """Assign shards to servers: the largest first, each to the server with the fewest bytes so far."""
        loads = [0] * len(self._servers)
        assigned: dict[int, list[HostShard]] = {}
        for shard in sorted(shards, key=lambda shard: -shard.nbytes):
            number = min(range(len(loads)), key=lambda n: (loads[n], (n - self._process) % len(loads)))
            loads[number] += shard.nbytes
            assigned.setdefault(number, []).append(shard)
        return assigned


class Push:
    """Publication of one version in progress, on a thread of its own."""

    def __init__(self, snapshot: Snapshot, publish: Callable[[Snapshot], None], then: Callable[[Snapshot], None]):
        self._snapshot = snapshot
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(publish, then), daemon=True).start()

    def snapshot(self) -> Snapshot:
        """Wait until the host copy is complete and return it."""
        return self._snapshot.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Return True if the version is published within so many seconds (None: no limit). Raises its error."""
        ended = self._ended.wait(timeout)
        if self._error is not None:
            raise self._error
        return ended

    @property
    def done(self) -> bool:
        """Return True when the publication has ended, in success or in an error."""
        return self._ended.is_set()

    def _run(self, publish: Callable[[Snapshot], None], then: Callable[[Snapshot], None]) -> None:
        try:
            publish(self._snapshot)
            then(self._snapshot)
        except BaseException as error:  # raised by `wait`
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
