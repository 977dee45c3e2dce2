"""What a version of the weights is: its tensors, the shards they are cut into, and what their contents must be."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from rl.parameter_server.index_ranges import IndexRange


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array of the policy; `path` are the keys of the nested dict, joined by slashes."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Shard of a tensor, as a trainer process pushed it to a shard server. `digest` is the XXH3-128 of its bytes."""

    tensor: str
    index_range: IndexRange
    digest: str
    server: int


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """What one of `processes` trainer processes says when all its shards of a version have been taken.

    Attributes:
        key: of this attempt to publish the version; the stores hold its shards under it (see `Directory.open`).
        incarnations: of the shard servers that took the shards: a server that has been restarted since has lost them.
        fingerprints: contents of every tensor by path (see fingerprint.py), from all processes the same.
    """

    version: int
    key: int
    process: int
    processes: int
    tensors: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    fingerprints: dict[str, str]
    incarnations: dict[int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A published version. `checksum` covers paths, shapes, dtypes and contents, whatever the sharding was."""

    version: int
    key: int
    tensors: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    fingerprints: dict[str, str]
    checksum: str

    def shards_by_tensor(self) -> dict[str, list[Shard]]:
        """By tensor."""
        by_tensor: dict[str, list[Shard]] = {tensor.path: [] for tensor in self.tensors}
        for shard in self.shards:
            by_tensor[shard.tensor].append(shard)
        return by_tensor


def to_text(record: Commit | Manifest) -> str:
    """As JSON."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":"))


def commit_from_text(text: str) -> Commit:
    """The inverse of `to_text`."""
    raw = json.loads(text)
    incarnations = {int(server): name for server, name in raw.pop("incarnations").items()}
    return Commit(**_with_parts(raw), incarnations=incarnations)


def manifest_from_text(text: str) -> Manifest:
    """The inverse of `to_text`."""
    return Manifest(**_with_parts(json.loads(text)))


def as_index_range(bounds: Iterable[Iterable[int]]) -> IndexRange:
    """An index range that has been through JSON."""
    return tuple((start, stop) for start, stop in bounds)


def _with_parts(raw: dict[str, Any]) -> dict[str, Any]:
    tensors = tuple(TensorSpec(t["path"], tuple(t["shape"]), t["dtype"]) for t in raw["tensors"])
    shards = tuple(Shard(**{**p, "index_range": as_index_range(p["index_range"])}) for p in raw["shards"])
    return {**raw, "tensors": tensors, "shards": shards}
