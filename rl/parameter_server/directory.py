"""The directory: which versions there are, who holds them, and who should read from whom.

A version comes to be in three steps: a trainer `open`s it and gets a key; each of its processes pushes its pieces under
that key; each `seal`s. With the last seal, if the boxes cover every tensor exactly, the version is published, at
once and whole. A trainer that dies in between leaves pieces under a key that nobody will ever ask for.

The directory lives in one process and remembers nothing on disk: if it dies, the trainer, which keeps the versions
still in use, publishes them again. It counts a version as lost when a data shard that held a part of it was restarted.
"""

import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rl.parameter_server.broadcast import Grant, Relays
from rl.parameter_server.errors import AttemptOver, WeightsError
from rl.parameter_server.fingerprint import fingerprint_version
from rl.parameter_server.index_ranges import check_cover
from rl.parameter_server.manifest import Manifest, Seal, manifest_from_text, to_text
from rl.parameter_server.store.shard_server import Shard


class Directory:
    """Safe to call from several threads. Versions are never reused for other contents."""

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        keep: int,
        relays: Relays,
        spills: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`spills`: the shards write versions that are no longer kept to a disk or bucket, and can bring them back."""
        self._shards, self._keep, self._relays, self._clock = list(shards), keep, relays, clock
        self._spills = spills
        self._leaving: dict[int, Manifest] = {}  # by key: being spilled
        self._coming: set[int] = set()  # keys: being brought back
        self._next_key = secrets.randbits(40) << 20  # never one that a directory before this one has given
        self._open: dict[int, dict[str, Any]] = {}  # key -> version, pusher, seals
        self._published: deque[int] = deque(maxlen=256)  # keys
        self._versions: dict[int, Manifest] = {}
        self._incarnations: dict[int, dict[int, str]] = {}  # version -> shard -> incarnation
        self._checksums: dict[int, str] = {}
        self._holders: dict[str, str] = {}  # worker -> endpoint, as text
        self._changed = threading.Condition()

    # ---- trainers

    def open(self, version: int, pusher: str, processes: int) -> int:
        """The key under which the processes of one trainer (`pusher`, another after every start) push a version.

        Raises:
            WeightsError: the version is older than all that are kept.
        """
        with self._changed:
            if len(self._versions) >= self._keep and version < min(self._versions):
                raise WeightsError(f"version {version} is older than all that are kept (held: {self._held()})")
            for key, attempt in self._open.items():
                same = (attempt["version"], attempt["pusher"], attempt["processes"]) == (version, pusher, processes)
                if same and len(attempt["seals"]) < processes:
                    return key
            self._next_key += 1
            self._open = {k: a for k, a in self._open.items() if a["pusher"] == pusher}  # others are dead
            self._open[self._next_key] = {"version": version, "pusher": pusher, "processes": processes, "seals": {}}
            return self._next_key

    def seal(self, seal: Seal) -> bool:
        """One process has pushed all its pieces; True if that has published the version.

        Raises:
            WeightsError: the pieces do not make up the tensors, the processes disagree, a shard was restarted
                meanwhile, or the version was published before with other contents.
        """
        with self._changed:
            attempt = self._open.get(seal.key)
            if attempt is None:
                raise AttemptOver(
                    f"version {seal.version}: this attempt to publish it is over: the parameter server was restarted, "
                    "or another trainer began"
                )
            attempt["seals"][seal.process] = seal
            if len(attempt["seals"]) < seal.processes:
                return False
            seals = [attempt["seals"][process] for process in sorted(attempt["seals"])]
        try:
            manifest, incarnations = _join(seals)
            self._check_alive(incarnations, seal.version)
            with self._changed:
                leaving = self._publish(manifest, incarnations)
                self._published.append(seal.key)
        finally:
            with self._changed:
                self._open.pop(seal.key, None)
                self._changed.notify_all()
        if leaving:
            threading.Thread(target=self._spill, args=(leaving,), name="spill", daemon=True).start()
        self._sweep()
        return True

    def outcome(self, key: int, timeout: float = 0.0) -> bool | list[int]:
        """What has become of an attempt within `timeout` seconds: whether it was published, or, as long as that is
        open, the trainer processes whose seals are awaited (none: all are here, and it is being decided).
        """
        with self._changed:
            self._changed.wait_for(lambda: key not in self._open, timeout)
            if (attempt := self._open.get(key)) is None:
                return key in self._published
            return [process for process in range(attempt["processes"]) if process not in attempt["seals"]]

    def rewind(self, version: int) -> None:
        """The trainer restarted from this version: forget every later one, they will be made again."""
        with self._changed:
            for later in [v for v in self._checksums if v > version]:
                del self._checksums[later]
                self._forget(later)
        if self._spills:
            for shard in self._shards:
                shard.forget_spilled(version)

    # ---- everyone

    def latest(self) -> int:
        """The newest version held, or -1."""
        with self._changed:
            return max(self._versions, default=-1)

    def oldest(self) -> int:
        """The oldest version held, or -1."""
        with self._changed:
            return min(self._versions, default=-1)

    def versions(self) -> list[int]:
        """Held in whole, oldest first, after a look at whether their shards still live: what a trainer asks who wants
        to know whether anything has to be published again.
        """
        with self._changed:
            known = dict(self._incarnations)
        now = self._alive()
        with self._changed:
            for version, incarnations in known.items():
                if any(now.get(shard) != name for shard, name in incarnations.items()):
                    self._forget(version)
            return sorted(self._versions)

    def manifest(self, version: int, timeout: float = 0.0) -> Manifest:
        """Of exactly this version, waiting up to `timeout` seconds for its publication.

        Raises:
            WeightsError: not there in time; says what is.
        """
        if self._spills and version not in self.versions():
            self._bring_back(version)
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._versions, timeout):
                raise WeightsError(
                    f"parameter server: version {version} not published within {timeout:.3g} s (held: {self._held()})"
                )
            return self._versions[version]

    def newer(self, version: int, timeout: float = 0.0) -> int:
        """The newest version held, as soon as it is above this one; else, after `timeout` seconds, what there is."""
        with self._changed:
            self._changed.wait_for(lambda: max(self._versions, default=-1) > version, timeout)
            return max(self._versions, default=-1)

    # ---- workers that serve each other

    def grant(
        self, worker: str, endpoint: str, share: str, version: int, timeout: float = 0.0
    ) -> tuple[int, str | None] | None:
        """From whom a worker, which itself can be read from at `endpoint`, may read its share now: (number of the
        grant, endpoint; None: the shards of the server). None if all places are taken for `timeout` seconds.
        """
        end = self._clock() + timeout
        with self._changed:
            if self._holders.setdefault(worker, endpoint) != endpoint:  # it was restarted, and holds nothing
                self._relays.forget(worker)
                self._holders[worker] = endpoint
            while True:
                granted: Grant | None = self._relays.grant(worker, share, version)
                if granted is not None:
                    return granted.id, None if granted.source is None else self._holders[granted.source]
                if (left := end - self._clock()) <= 0:
                    return None
                self._changed.wait(min(left, 0.5))

    def done(self, grant: int, serves: bool) -> None:
        """The worker has its share and, if it `serves`, gives it to others."""
        with self._changed:
            self._relays.done(grant, serves)
            self._changed.notify_all()

    def failed(self, grant: int, source_is_dead: bool) -> None:
        """The worker could not read it."""
        with self._changed:
            self._relays.failed(grant, source_is_dead)
            self._changed.notify_all()

    def forget(self, worker: str) -> None:
        """A worker has gone."""
        with self._changed:
            self._holders.pop(worker, None)
            self._relays.forget(worker)
            self._changed.notify_all()

    # ---- parts

    def _publish(self, manifest: Manifest, incarnations: dict[int, str]) -> list[Manifest]:
        """Returns those that have to be spilled now."""
        version = manifest.version
        known = self._checksums.setdefault(version, manifest.checksum)
        if known != manifest.checksum:
            raise WeightsError(
                f"version {version} was published before with checksum {known}; "
                f"refusing other weights under the same number ({manifest.checksum})"
            )
        if version not in self._versions:
            self._versions[version], self._incarnations[version] = manifest, incarnations
        leaving = []
        for old in sorted(self._versions)[: -self._keep]:
            if self._spills:
                leaving.append(self._versions[old])
            self._forget(old)
        self._leaving |= {one.key: one for one in leaving}
        oldest = min(self._versions)
        self._checksums = {v: checksum for v, checksum in self._checksums.items() if v >= oldest}
        self._changed.notify_all()
        return leaving

    def _forget(self, version: int) -> None:
        self._versions.pop(version, None)
        self._incarnations.pop(version, None)
        self._relays.drop_version(version)

    def _spill(self, leaving: Sequence[Manifest]) -> None:
        for manifest in leaving:
            try:
                for shard in self._shards:
                    shard.spill(manifest.key, manifest.version, to_text(manifest))
            except WeightsError as error:  # it is an old version; the run does not depend on it
                logging.getLogger(__name__).warning("version %d was not spilled: %s", manifest.version, error)
            with self._changed:
                del self._leaving[manifest.key]
        self._sweep()

    def _bring_back(self, version: int) -> None:
        with self._changed:
            self._next_key += 1
            key = self._next_key
            self._coming.add(key)  # or a sweep meanwhile would take it for rubbish
        try:
            texts = [shard.recall(version, key) for shard in self._shards]
            if None in texts or not texts[0]:
                return
            manifest = dataclasses.replace(manifest_from_text(texts[0]), key=key)
            alive = self._alive()
            with self._changed:
                if version not in self._versions:
                    self._versions[version], self._incarnations[version] = manifest, alive
                self._changed.notify_all()
        finally:
            with self._changed:
                self._coming.discard(key)

    def _sweep(self) -> None:
        """Let shards drop what belongs to no version, held or under way. One that is dead has nothing to drop."""
        with self._changed:
            keys = {*(m.key for m in self._versions.values()), *self._open, *self._leaving, *self._coming}
        for shard in self._shards:
            try:
                shard.keep(keys)
            except WeightsError:
                continue

    def _check_alive(self, incarnations: dict[int, str], version: int) -> None:
        now = self._alive()
        for shard, name in incarnations.items():
            if now.get(shard) != name:
                raise AttemptOver(
                    f"version {version}: data shard {shard} of the parameter server was restarted while it was pushed"
                )

    def _alive(self) -> dict[int, str]:
        alive = {}
        for number, shard in enumerate(self._shards):
            try:
                alive[number] = shard.incarnation()
            except WeightsError:
                continue
        return alive

    def _held(self) -> str:
        return ", ".join(map(str, sorted(self._versions))) or "none"


def _join(seals: Sequence[Seal]) -> tuple[Manifest, dict[int, str]]:
    first = seals[0]
    for seal in seals[1:]:
        if seal.tensors != first.tensors or seal.fingerprints != first.fingerprints:
            raise WeightsError(
                f"version {first.version}: trainer processes {first.process} and {seal.process} have other tensors or "
                "contents; are they of one run?"
            )
    pieces = tuple(piece for seal in seals for piece in seal.pieces)
    boxes: dict[str, list[Any]] = {tensor.path: [] for tensor in first.tensors}
    for piece in pieces:
        boxes[piece.tensor].append(piece.box)
    for tensor in first.tensors:
        check_cover(f"version {first.version}, {tensor.path}", tensor.shape, boxes[tensor.path])
    incarnations: dict[int, str] = {}
    for seal in seals:
        for shard, name in seal.incarnations.items():
            if incarnations.setdefault(shard, name) != name:
                raise AttemptOver(
                    f"version {first.version}: data shard {shard} was restarted between two processes' pushes"
                )
    checksum = fingerprint_version(first.fingerprints)
    return Manifest(first.version, first.key, first.tensors, pieces, first.fingerprints, checksum), incarnations
