"""Attempts to publish: which processes of a trainer have committed, and whether their shards make up a version."""

import dataclasses
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rl.parameter_server.errors import PublishAborted, WeightsError
from rl.parameter_server.fingerprint import fingerprint_version
from rl.parameter_server.index_ranges import check_cover
from rl.parameter_server.manifest import Commit, Manifest


@dataclasses.dataclass(slots=True)
class _Attempt:
    """Attempt of one trainer to publish a version; `pusher` is the trainer's name, different after every start."""

    version: int
    pusher: str
    processes: int
    commits: dict[int, Commit] = dataclasses.field(default_factory=dict)  # process -> commit

    @property
    def missing(self) -> list[int]:
        """Processes that have not committed."""
        return [process for process in range(self.processes) if process not in self.commits]


class PushAttempts:
    """Attempts under way, by key, and the keys that were published lately. The caller holds a lock."""

    def __init__(self) -> None:
        self._next_key = secrets.randbits(40) << 20  # never a key of an earlier directory
        self._open: dict[int, _Attempt] = {}
        self._published: deque[int] = deque(maxlen=256)

    def new_key(self) -> int:
        """Return a key that was never used."""
        self._next_key += 1
        return self._next_key

    def keys(self) -> list[int]:
        """Return the keys of the attempts under way."""
        return list(self._open)

    def open(self, version: int, pusher: str, processes: int) -> int:
        """Return the key of the attempt that the trainer's processes share; attempts of other trainers end."""
        for key, attempt in self._open.items():
            same = (attempt.version, attempt.pusher, attempt.processes) == (version, pusher, processes)
            if same and attempt.missing:
                return key
        key = self.new_key()
        self._open = {k: a for k, a in self._open.items() if a.pusher == pusher}  # other trainers are dead
        self._open[key] = _Attempt(version, pusher, processes)
        return key

    def record(self, commit: Commit) -> list[Commit] | None:
        """Record a process's commit; returns all in order, or None if some lack (PublishAborted: no such attempt)."""
        attempt = self._open.get(commit.key)
        if attempt is None:
            raise PublishAborted(
                f"version {commit.version}: publishing was aborted: the parameter server was restarted, or another "
                "trainer started"
            )
        attempt.commits[commit.process] = commit
        if attempt.missing:
            return None
        return [attempt.commits[process] for process in sorted(attempt.commits)]

    def succeeded(self, key: int) -> None:
        """Record that the attempt has published its version."""
        self._published.append(key)

    def close(self, key: int) -> None:
        """End an attempt."""
        self._open.pop(key, None)

    def outcome(self, key: int) -> bool | list[int]:
        """Return whether the attempt was published; while it is open, the processes that have not committed."""
        attempt = self._open.get(key)
        return key in self._published if attempt is None else attempt.missing


def check_alive(version: int, incarnations: Mapping[int, str], alive: Mapping[int, str]) -> None:
    """Refuse a version of which a shard server was restarted while it was pushed (PublishAborted)."""
    for server, name in incarnations.items():
        if alive.get(server) != name:
            raise PublishAborted(f"version {version}: shard server {server} was restarted while the version was pushed")


def join_commits(commits: Sequence[Commit]) -> tuple[Manifest, dict[int, str]]:
    """Return the manifest of what all processes have pushed, and the incarnations of the shard servers that have it.

    Raises:
        WeightsError: the processes disagree, or the shards do not make up the tensors. PublishAborted: a shard server
            was restarted in between.
    """
    first = commits[0]
    for commit in commits[1:]:
        if commit.tensors != first.tensors or commit.fingerprints != first.fingerprints:
            raise WeightsError(
                f"version {first.version}: trainer processes {first.process} and {commit.process} committed different "
                "tensors or contents; do they belong to one run?"
            )
    shards = tuple(shard for commit in commits for shard in commit.shards)
    index_ranges: dict[str, list[Any]] = {tensor.path: [] for tensor in first.tensors}
    for shard in shards:
        index_ranges[shard.tensor].append(shard.index_range)
    for tensor in first.tensors:
        check_cover(f"version {first.version}, {tensor.path}", tensor.shape, index_ranges[tensor.path])
    incarnations: dict[int, str] = {}
    for commit in commits:
        for server, name in commit.incarnations.items():
            if incarnations.setdefault(server, name) != name:
                raise PublishAborted(
                    f"version {first.version}: shard server {server} was restarted between two processes' pushes"
                )
    checksum = fingerprint_version(first.fingerprints)
    return Manifest(first.version, first.key, first.tensors, shards, first.fingerprints, checksum), incarnations
