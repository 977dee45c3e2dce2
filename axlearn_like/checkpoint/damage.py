"""Damage of a checkpoint, decided from the bytes of its files alone; and what it claims of them, within bounds.

Reading fails for many reasons: permissions, a full table of file handles, no memory, a device that is missing. None of
them makes the content bad, and advice to throw it away would lose it. So when reading has failed, whatever the reason,
the files are read once more, without devices and without Orbax, and compared with the manifest beside them.

Descriptions of arrays are read within bounds, and compared with the files before anything is allocated. A checkpoint
may be anyone's: a pipe among its files would block its reader for ever, and an axis of a million million would end the
process.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import xxhash

from axlearn_like.checkpoint.manifest import part_checksum
from axlearn_like.checkpoint.versions import CheckpointError
from mesh.files.bounded import LARGE, SMALL, BoundsError, check_regular, read_json

MANIFEST, EXTRAS = "manifest", "extras"
# Statuses with which TensorStore says that bytes are not what a format demands; others are of the machine.
_STATUSES = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")


def find_damage(path: Path) -> str | None:
    """Return what in a step's directory is not as it was written; None: all that its manifest lists is.

    Arrays are read one after another to host memory.

    Raises:
        OSError: bytes cannot be read, so there is no verdict. So do other errors that say nothing about the bytes.
    """
    try:
        check_files(path)
    except CheckpointError as error:
        return str(error)
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with open(file, "rb") as opened:  # refused by the system: no verdict
                opened.read(1)
    os.listdir(path)
    try:
        manifest = read_json(path / MANIFEST / "metadata")
        digest = manifest[EXTRAS]["json"]["digest"]
        arrays = {item: entries for item, entries in manifest.items() if item != EXTRAS}
    except FileNotFoundError:
        return f"{path / MANIFEST / 'metadata'} is missing"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{path / MANIFEST} lists no arrays ({type(error).__name__}: {error})"
    try:
        if digest_of(read_json(path / EXTRAS / "metadata", LARGE)) != digest:
            return f"the content of {path / EXTRAS} does not match its digest"
    except FileNotFoundError:
        return f"{path / EXTRAS / 'metadata'} is missing"
    except (ValueError, RecursionError) as error:
        return f"{path / EXTRAS} is no JSON ({error})"
    for item, entries in arrays.items():
        for name, entry in entries.items():
            if isinstance(entry, Mapping) and "checksum" in entry and (why := _of_array(path / item, name, entry)):
                return why
    return None


def digest_of(extras: Mapping[str, Any]) -> str:
    """Return the XXH3-128 of the extras, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(json.dumps(extras, sort_keys=True).encode())


def _of_array(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    dtype = jnp.dtype(entry["dtype"])
    if not (folder / "manifest.ocdbt").exists() and not (folder / name.replace("/", ".")).exists():
        return f"{folder} has no {name!r}"
    try:
        store = open_store(folder, name).result()
        if (fault := store_fault(name, store, entry["shape"])) is not None:
            return fault
        array = np.asarray(store.read().result())
    except Exception as error:  # errors of TensorStore, told apart by the start of their texts
        if str(error).startswith(_STATUSES):
            return f"{name!r}: {str(error).split(' [', 1)[0][:200]}"
        raise
    if array.dtype != dtype:
        return f"{name!r} has dtype {array.dtype}, expected {dtype}"
    if part_checksum(np.ascontiguousarray(array).reshape(-1), [1], 0) != entry["checksum"]:
        return f"the content of {name!r} does not match its checksum"
    return None


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
