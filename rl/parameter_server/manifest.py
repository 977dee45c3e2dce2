"""What a version of the weights is: its tensors, the pieces they are cut into, and what their contents must be."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from rl.parameter_server.index_ranges import Box


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array of the policy; `path` are the keys of the nested dict, joined by slashes."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, as one trainer process pushed it to one data shard of the server. `digest` is XXH3-128."""

    tensor: str
    box: Box
    digest: str
    shard: int


@dataclasses.dataclass(frozen=True, slots=True)
class Seal:
    """What one of `processes` trainer processes says when all its pieces of a version have been taken.

    Attributes:
        key: of this attempt to publish the version; the stores hold its pieces under it (see `Directory.open`).
        incarnations: of the data shards that took the pieces: a shard that has been restarted since has lost them.
        fingerprints: contents of every tensor by path (see fingerprint.py), from all processes the same.
    """

    version: int
    key: int
    process: int
    processes: int
    tensors: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    fingerprints: dict[str, str]
    incarnations: dict[int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A published version. `checksum` covers paths, shapes, dtypes and contents, whatever the sharding was."""

    version: int
    key: int
    tensors: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    fingerprints: dict[str, str]
    checksum: str

    def pieces_of(self) -> dict[str, list[Piece]]:
        """By tensor."""
        by_tensor: dict[str, list[Piece]] = {tensor.path: [] for tensor in self.tensors}
        for piece in self.pieces:
            by_tensor[piece.tensor].append(piece)
        return by_tensor


def to_text(record: Seal | Manifest) -> str:
    """As JSON."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":"))


def seal_from_text(text: str) -> Seal:
    """The inverse of `to_text`."""
    raw = json.loads(text)
    incarnations = {int(shard): name for shard, name in raw.pop("incarnations").items()}
    return Seal(**_with_parts(raw), incarnations=incarnations)


def manifest_from_text(text: str) -> Manifest:
    """The inverse of `to_text`."""
    return Manifest(**_with_parts(json.loads(text)))


def as_box(bounds: Iterable[Iterable[int]]) -> Box:
    """A box that has been through JSON."""
    return tuple((start, stop) for start, stop in bounds)


def _with_parts(raw: dict[str, Any]) -> dict[str, Any]:
    tensors = tuple(TensorSpec(t["path"], tuple(t["shape"]), t["dtype"]) for t in raw["tensors"])
    pieces = tuple(Piece(**{**p, "box": as_box(p["box"])}) for p in raw["pieces"])
    return {**raw, "tensors": tensors, "pieces": pieces}
