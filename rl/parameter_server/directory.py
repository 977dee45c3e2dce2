"""The directory: which versions exist, which servers hold their shards, and who reads from whom.

A version is published in three steps: a trainer calls `open` and gets a key; each of its processes pushes its shards
under that key; each process calls `commit`. The last commit publishes the version atomically, if the shards cover every
tensor exactly. A trainer that dies in between leaves shards under a key that nobody will ever request.

The directory lives in one process and stores nothing on disk: if it dies, the trainer, which keeps the versions still
in use, publishes them again. A version is lost when a shard server that held a part of it was restarted.
"""

import dataclasses
import logging
from collections.abc import Sequence

from axlearn_like.run.clock import REAL, RunClock
from rl.parameter_server.broadcast import BroadcastScheduler, Grant
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.manifest import Commit, Manifest, manifest_from_text, to_text
from rl.parameter_server.push.attempts import PushAttempts, check_alive, join_commits
from rl.parameter_server.store.shard_server import ShardServer, live_servers
from rl.parameter_server.store.sweeper import Sweeper

_LEAST, _MOST = 0.001, 5.0  # seconds between two looks of a reader for a source


class Directory:
    """Directory of all versions. Thread-safe. A version number is never reused for other contents."""

    def __init__(
        self,
        servers: Sequence[ShardServer],
        *,
        keep: int,
        broadcast: BroadcastScheduler,
        offloads: bool = False,
        sweep_delay: float = 0.0,
        clock: RunClock = REAL,
    ):
        """Store the settings.

        Args:
            broadcast: schedules who reads from whom.
            offloads: the shard servers write evicted versions to a disk or bucket, and can restore them.
            sweep_delay: seconds from a publication until shard servers drop what it has evicted, which costs them
                processor time that readers have more use for; 0: at once, before it is confirmed. It ends when the
                next version is opened. What is offloaded is written at once, which costs more, and dropped after that.
        """
        self._servers, self._keep, self._broadcast, self._clock = list(servers), keep, broadcast, clock
        self._offloads = offloads
        self._offloading: dict[int, Manifest] = {}  # key -> version being offloaded
        self._restoring: set[int] = set()  # keys: being restored
        self._attempts = PushAttempts()
        self._trainer: str | None = None  # the only trainer that may publish; None: any
        self._versions: dict[int, Manifest] = {}
        self._incarnations: dict[int, dict[int, str]] = {}  # version -> server -> incarnation
        self._checksums: dict[int, str] = {}
        self._pinned: int | None = None  # a version that is not evicted
        self._held_for_good: set[int] = set()  # versions that are never evicted
        self._shard_servers: dict[str, str] = {}  # worker -> endpoint, as text
        self._changed = clock.condition()
        self._sweeper = Sweeper(self._servers, self._used, self._changed, sweep_delay, clock)

    # ---- trainers

    def open(self, version: int, pusher: str, processes: int) -> int:
        """Return the key under which the processes of one trainer push a version.

        Args:
            pusher: name of the trainer, different after every start.

        Raises:
            WeightsError: the version is older than all that are kept, or another trainer has taken over.
        """
        self._sweeper.finish()  # frees servers of evicted versions before the next push
        with self._changed:
            if self._trainer not in (None, pusher):
                raise WeightsError(f"version {version}: another trainer has taken over; this one publishes no more")
            if len(self._versions) >= self._keep and version < min(self._versions):
                raise WeightsError(f"version {version} is older than all that are kept (held: {self._held()})")
            return self._attempts.open(version, pusher, processes)

    def commit(self, commit: Commit) -> bool:
        """Record that one process has pushed all its shards; return True if the version is published with that.

        A commit that is repeated, because its answer was lost or came too late, changes nothing.

        Raises:
            WeightsError: the shards do not make up the tensors, the processes disagree, a shard server was restarted in
                between, or the version was published before with other contents.
        """
        with self._changed:
            if self._attempts.outcome(commit.key) is True:
                return True
            commits = self._attempts.record(commit)
            if commits is None:
                return False
        try:
            manifest, incarnations = join_commits(commits)
            check_alive(commit.version, incarnations, live_servers(self._servers))
            with self._changed:
                evicted = self._publish(manifest, incarnations)
                self._attempts.succeeded(commit.key)
        finally:
            with self._changed:
                self._attempts.close(commit.key)
                self._changed.notify_all()
        if evicted:
            self._clock.thread(lambda: self._offload(evicted), "offload")
        self._sweeper.soon()
        return True

    def outcome(self, key: int, timeout: float = 0.0) -> bool | list[int]:
        """Wait `timeout` seconds for an attempt's end: True: published, False: aborted, else who has to commit."""
        with self._changed:
            self._changed.wait_for(lambda: isinstance(self._attempts.outcome(key), bool), timeout)
            return self._attempts.outcome(key)

    def pin(self, version: int, *, for_good: bool = False) -> None:
        """Hold this version, however many newer ones come: until another is pinned (evaluated), or `for_good`."""
        with self._changed:
            if for_good:
                self._held_for_good.add(version)
            else:
                self._pinned = version

    def rewind(self, version: int, pusher: str | None = None) -> None:
        """Forget every version after this one: a trainer begins with it and will publish them again.

        Where its name is given, no other trainer publishes from now on: one that was given up may still run.
        """
        with self._changed:
            self._trainer = pusher or self._trainer
            for later in [v for v in self._checksums if v > version]:
                del self._checksums[later]
                self._forget(later)
        if self._offloads:
            for server in self._servers:
                server.drop_offloaded(version)

    # ---- readers

    def latest(self) -> int:
        """Return the newest version held, or -1."""
        with self._changed:
            return max(self._versions, default=-1)

    def versions(self) -> list[int]:
        """Return the complete versions on live shard servers, each of which is asked, oldest first."""
        with self._changed:
            known = dict(self._incarnations)
        now = live_servers(self._servers)
        with self._changed:
            for version, incarnations in known.items():
                if any(now.get(server) != name for server, name in incarnations.items()):
                    self._forget(version)
            return sorted(self._versions)

    def manifest(self, version: int, timeout: float = 0.0) -> Manifest:
        """Return this version's manifest, within `timeout` seconds (WeightsError: names the versions held)."""
        if self._offloads and version not in self.versions():
            self._restore(version)
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._versions, timeout):
                raise WeightsError(
                    f"parameter server: version {version} not published within {timeout:.3g} s (held: {self._held()})"
                )
            return self._versions[version]

    def newer(self, version: int, timeout: float = 0.0) -> int:
        """Return the newest version as soon as it is above this one; after `timeout` seconds, the newest there is."""
        with self._changed:
            self._changed.wait_for(lambda: self.latest() > version, timeout)
            return self.latest()

    # ---- peer-to-peer broadcast

    def grant(
        self, worker: str, endpoint: str, shard_set: str, version: int, timeout: float = 0.0
    ) -> tuple[int, str | None] | None:
        """Assign a source from which a worker may read its shard set.

        Args:
            worker: the reader.
            endpoint: where the worker itself serves.
            shard_set: digest of the index ranges and dtypes that it wants.
            timeout: seconds to wait for a source with a free slot.

        Returns:
            Grant number and endpoint of the source (None: the shard servers); None if all sources were busy.
        """
        end = self._clock() + timeout
        with self._changed:
            if self._shard_servers.setdefault(worker, endpoint) != endpoint:  # restarted worker holds nothing
                self._broadcast.forget(worker)
                self._shard_servers[worker] = endpoint
            while True:
                change = self._broadcast.next_change()  # asked first: what expires later, `grant` sees
                granted: Grant | None = self._broadcast.grant(worker, shard_set, version)
                if granted is not None:
                    return granted.id, None if granted.source is None else self._shard_servers[granted.source]
                if (left := end - self._clock()) <= 0:
                    return None
                due = _MOST if change is None else max(change - self._clock(), _LEAST)
                self._changed.wait(min(left, due, _MOST))

    def done(self, grant: int, serves: bool) -> None:
        """Record that the worker has its shard set and, if it `serves`, is a source for others."""
        with self._changed:
            self._broadcast.done(grant, serves)
            self._changed.notify_all()

    def failed(self, grant: int, source_is_dead: bool) -> None:
        """Record that the worker could not read from its source."""
        with self._changed:
            self._broadcast.failed(grant, source_is_dead)
            self._changed.notify_all()

    def forget(self, worker: str) -> None:
        """Remove a worker that has left."""
        with self._changed:
            self._shard_servers.pop(worker, None)
            self._broadcast.forget(worker)
            self._changed.notify_all()

    # ---- internals

    def _publish(self, manifest: Manifest, incarnations: dict[int, str]) -> list[Manifest]:
        """Publish a version, and return the evicted ones that are to be offloaded."""
        version = manifest.version
        known = self._checksums.setdefault(version, manifest.checksum)
        if known != manifest.checksum:
            raise WeightsError(
                f"version {version} was published before with checksum {known}; "
                f"refusing other weights under the same number ({manifest.checksum})"
            )
        if version not in self._versions:
            self._versions[version], self._incarnations[version] = manifest, incarnations
        pinned = {self._pinned, *self._held_for_good}
        over = [old for old in sorted(self._versions)[: -self._keep] if old not in pinned]
        evicted = [self._versions[old] for old in over] if self._offloads else []
        for old in over:
            self._forget(old)
        self._offloading |= {one.key: one for one in evicted}
        oldest = min(self._versions)
        self._checksums = {v: checksum for v, checksum in self._checksums.items() if v >= oldest}
        self._changed.notify_all()
        return evicted

    def _forget(self, version: int) -> None:
        self._versions.pop(version, None)
        self._incarnations.pop(version, None)
        self._broadcast.drop_version(version)
        self._changed.notify_all()

    def _offload(self, evicted: Sequence[Manifest]) -> None:
        for manifest in evicted:
            try:
                for server in self._servers:
                    server.offload(manifest.key, manifest.version, to_text(manifest))
            except WeightsError as error:  # the run does not depend on an old version
                logging.getLogger(__name__).warning("version %d was not offloaded: %s", manifest.version, error)
            with self._changed:
                del self._offloading[manifest.key]
        self._sweeper.sweep()

    def _restore(self, version: int) -> None:
        with self._changed:
            key = self._attempts.new_key()
            self._restoring.add(key)  # keeps a concurrent sweep from dropping it
        try:
            texts = [server.restore(version, key) for server in self._servers]
            if None in texts or not texts[0]:
                return
            manifest = dataclasses.replace(manifest_from_text(texts[0]), key=key)
            alive = live_servers(self._servers)
            with self._changed:
                if version not in self._versions:
                    self._versions[version], self._incarnations[version] = manifest, alive
                self._changed.notify_all()
        finally:
            with self._changed:
                self._restoring.discard(key)

    def _used(self) -> set[int]:
        held = {manifest.key for manifest in self._versions.values()}
        return {*held, *self._attempts.keys(), *self._offloading, *self._restoring}

    def _held(self) -> str:
        return ", ".join(map(str, sorted(self._versions))) or "none"
