"""Metadata of a version: its tensors, the shards they are cut into, and the checksums of their contents."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from rl.parameter_server.index_ranges import IndexRange


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Array of the policy."""

    path: str  # keys of the nested dict, joined by slashes
    shape: tuple[int, ...]
    dtype: str
    frozen: bool = False  # no update changes it, so later versions have the same contents
    unrounded: bool = False  # layers compute with it in its own type (`Layer.unrounded`), so no codec rounds it


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Shard of a tensor, as a trainer process pushed it to a shard server."""

    tensor: str
    index_range: IndexRange
    server: int  # number of the shard server


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """Message of one of `processes` trainer processes that the servers have all its shards of a version."""

    version: int
    key: int  # key of this attempt to publish the version; the stores hold its shards under it (see `Directory.open`)
    process: int
    processes: int
    tensors: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    fingerprints: dict[str, str]  # contents of every tensor by path (see fingerprint.py), the same from all processes
    # Incarnations of the shard servers that took the shards: one that was restarted since has lost them
    incarnations: dict[int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """Published version. `checksum` covers paths, shapes, dtypes and contents, independent of the sharding."""

    version: int
    key: int
    tensors: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    fingerprints: dict[str, str]
    checksum: str

    def shards_by_tensor(self) -> dict[str, list[Shard]]:
        """Return the shards of each tensor."""
        by_tensor: dict[str, list[Shard]] = {tensor.path: [] for tensor in self.tensors}
        for shard in self.shards:
            by_tensor[shard.tensor].append(shard)
        return by_tensor


def to_text(record: Commit | Manifest) -> str:
    """Encode as JSON."""
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
    """Convert an index range that has been through JSON back to tuples."""
    return tuple((start, stop) for start, stop in bounds)


def _with_parts(raw: dict[str, Any]) -> dict[str, Any]:
    tensors = tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in raw["tensors"])
    # Only these keys: offloaded manifests of earlier versions have a digest of each shard, too.
    shards = tuple(Shard(p["tensor"], as_index_range(p["index_range"]), p["server"]) for p in raw["shards"])
    return {**raw, "tensors": tensors, "shards": shards}
