"""Damage of a checkpoint, decided from the bytes of its files alone.

Reading fails for many reasons: permissions, a full table of file handles, no memory, a device that is missing. None of
them makes the content bad, and advice to throw it away would lose it. So when reading has failed, whatever the reason,
the files are read once more, without devices and without Orbax, and compared with the manifest beside them.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import xxhash

from axlearn_like.checkpoint.claims import check_files, open_store, store_fault
from axlearn_like.checkpoint.manifest import part_checksum
from axlearn_like.checkpoint.versions import CheckpointError
from mesh.files.bounded import LARGE, read_json

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
