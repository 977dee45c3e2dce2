"""Descriptions of a checkpoint's arrays, read within bounds and compared with its files before anything is allocated.

A checkpoint may be anyone's: a pipe among its files would block its reader for ever, and an axis of a million million
would end the process.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from axlearn_like.checkpoint.versions import CheckpointError
from mesh.files.bounded import LARGE, SMALL, BoundsError, check_regular, read_json

_DESCRIBING = ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "metadata", "zarr.json")
_STORE, _LONG = "manifest.ocdbt", "extras"
_LARGER = 1000  # times what the files hold, whatever compresses them
_FREE = 64 << 20  # bytes that need no file
_AXES = 32


def check_files(step: Path) -> int:
    """Return the bytes of the files of a step.

    Raises:
        CheckpointError: one is a pipe, a device or a socket; one that describes others is no JSON, or too long; names
            it.
    """
    total = 0
    for parent, _, names in os.walk(step):
        for name in names:
            path = Path(parent, name)
            try:
                found = path.stat()
                check_regular(found.st_mode)
                if name == _STORE and found.st_size > LARGE:
                    raise BoundsError(f"expected at most {LARGE:,} bytes, got {found.st_size:,}")
                if name in _DESCRIBING:
                    read_json(path, LARGE if path.parent.name == _LONG else SMALL)
            except (BoundsError, ValueError) as error:
                raise CheckpointError(f"checkpoint {step}: {path.relative_to(step)} is damaged ({error})") from None
            except OSError:  # a link to nothing, or no right to read: its reader says so
                continue
            total += found.st_size
    return total


def check_entries(step: Path, manifest: Any) -> None:
    """Refuse parameters of a manifest without a name, a shape and a dtype (CheckpointError)."""
    if not isinstance(manifest, Mapping):
        raise CheckpointError(f"checkpoint {step}: expected a manifest of parameters, got {str(manifest):.200}")
    for name, entry in manifest.items():
        try:
            whole = all(type(axis) is int and axis >= 0 for axis in entry["shape"]) and len(entry["shape"]) <= _AXES
            whole = whole and not jnp.dtype(entry["dtype"]).hasobject and type(entry["checksum"]) is int
        except (LookupError, TypeError, ValueError):
            whole = False
        if not whole:
            raise CheckpointError(
                f"checkpoint {step}: {name:.200}: expected shape, dtype and checksum, got {str(entry):.200}"
            )


def check_sizes(step: Path, manifest: Mapping[str, Any], held: int) -> None:
    """Refuse a manifest whose arrays are far larger than the files, of `held` bytes (CheckpointError)."""
    wanted = sum(math.prod(entry["shape"]) * jnp.dtype(entry["dtype"]).itemsize for entry in manifest.values())
    if wanted > _LARGER * held + _FREE:
        raise CheckpointError(
            f"checkpoint {step}: its manifest has arrays of {wanted:,} bytes, its files {held:,} bytes"
        )


def open_store(folder: Path, name: str) -> Any:
    """Return the future of a parameter on disk, by TensorStore; nothing but its description is read."""
    import tensorstore as ts

    stored = name.replace("/", ".")
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{folder / stored}/"}
    if (folder / _STORE).exists():
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{stored}/"}
    return ts.open({"driver": "auto", "kvstore": kvstore}, open=True, read=True)


def check_stores(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse parameters on disk of other shapes than the manifest's, or in chunks larger than they are (ValueError)."""
    opened = {name: open_store(folder, name) for name in manifest}
    for name, future in opened.items():
        if (error := future.exception()) is not None:
            raise error
        if (fault := store_fault(name, future.result(), manifest[name]["shape"])) is not None:
            raise ValueError(fault)


def store_fault(name: str, store: Any, shape: list[int]) -> str | None:
    """Return what is wrong with an array on disk by its own description: another shape, or chunks larger than it."""
    chunk = store.chunk_layout.read_chunk.shape or ()
    if list(store.shape) != list(shape):
        return f"{name!r} has shape {list(store.shape)}, expected {list(shape)}"
    if any(size > max(1, axis) for size, axis in zip(chunk, shape, strict=False)):
        return f"{name!r} of shape {list(shape)} has chunks of {list(chunk)}"
    return None
