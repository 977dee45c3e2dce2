"""One version of the weights as bytes: a manifest that says what lies where, a buffer, and a checksum over both."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params
from mesh import UserError


class WeightsError(UserError):
    """Weights that are damaged, of another shape, or of a version that is not to be had."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayEntry:
    """Where one array lies in the buffer."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What a buffer holds. `checksum` is BLAKE2b over the version, the entries and the bytes."""

    version: int
    entries: tuple[ArrayEntry, ...]
    nbytes: int
    checksum: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Manifest":
        raw = json.loads(text)
        entries = tuple(ArrayEntry(**{**e, "shape": tuple(e["shape"])}) for e in raw.pop("entries"))
        return Manifest(entries=entries, **raw)


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedWeights:
    """A manifest and its buffer."""

    manifest: Manifest
    buffer: bytes | bytearray | memoryview


def encode(params: Params, version: int) -> EncodedWeights:
    """Raw little-endian bytes of every array, in order of their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    arrays = jax.device_get([leaf for _, leaf in leaves])
    entries, chunks, offset = [], [], 0
    for (path, _), array in zip(leaves, arrays, strict=True):
        data = np.asarray(array, order="C")  # ascontiguousarray would give a scalar an axis
        name = "/".join(str(key.key) for key in path)
        entries.append(ArrayEntry(name, data.shape, data.dtype.name, offset, data.nbytes))
        chunks.append(data.reshape(-1).view(np.uint8))
        offset += data.nbytes
    buffer = np.concatenate(chunks).tobytes() if chunks else b""
    checksum = _checksum(version, tuple(entries), buffer)
    return EncodedWeights(Manifest(version, tuple(entries), offset, checksum), buffer)


def decode(weights: EncodedWeights) -> dict[str, Any]:
    """The nested dict of host arrays (views of the buffer).

    Raises:
        WeightsError: the bytes are not those that were encoded.
    """
    verify(weights)
    params: dict[str, Any] = {}
    for entry in weights.manifest.entries:
        count = int(np.prod(entry.shape, dtype=np.int64))
        array = np.frombuffer(weights.buffer, np.dtype(entry.dtype), count, entry.offset)
        *parents, name = entry.path.split("/")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array.reshape(entry.shape)
    return params


def verify(weights: EncodedWeights) -> None:
    """Raise WeightsError unless the buffer is the one its manifest describes."""
    manifest = weights.manifest
    if len(weights.buffer) != manifest.nbytes:
        raise WeightsError(
            f"weights of version {manifest.version}: {len(weights.buffer)} bytes arrived, "
            f"the manifest says {manifest.nbytes}"
        )
    found = _checksum(manifest.version, manifest.entries, weights.buffer)
    if found != manifest.checksum:
        raise WeightsError(
            f"weights of version {manifest.version} are damaged: checksum {found}, "
            f"the manifest says {manifest.checksum}"
        )


def _checksum(
    version: int, entries: tuple[ArrayEntry, ...], buffer: bytes | bytearray | memoryview
) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([version, [dataclasses.astuple(e) for e in entries]]).encode())
    digest.update(buffer)
    return digest.hexdigest()
