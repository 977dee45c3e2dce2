"""States of models on disk: a safetensors file each, complete or not there, and refused if a byte has changed.

A file's metadata hold the spec, the steps taken, the base, a checksum of all bytes of arrays, and what else the writer
notes. Arrays are `factors/layers/attention/q_dkqh/a` and the like; `first`, `second` and `gradients` are there if they
are not zero and were asked for.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.layers.wrappers.adapters import Factors
from rl.serving.service.durable.journal import sync_folder
from rl.serving.service.messages import LoraSpec, ServiceError
from rl.serving.service.slots import SlotState

_PARTS = ("factors", "first", "second", "gradients")
_FORMAT = "axl-slot-1"
_MOST_HEADER = 1 << 24


def write_state(
    path: Path, state: SlotState, notes: Mapping[str, Any] | None = None, *, base: str = "", optimizer: bool = True
) -> None:
    """Write a state, in place of what was there: aside, to disk, then under its name.

    Args:
        path: the file; its folder is made.
        state: the state.
        notes: other values for the header, as JSON has them.
        base: name of the base; a reader that gives another name is refused.
        optimizer: with steps, moments and gradients, too.
    """
    if not optimizer:
        state = dataclasses.replace(state, step=0, first=None, second=None, gradients=None)
    arrays = {
        f"{part}/{name}/{which}": np.ascontiguousarray(array, "<f4")
        for part in _PARTS
        for name, factors in (getattr(state, part) or {}).items()
        for which, array in zip("ab", factors, strict=True)
    }
    entries, end = dict[str, Any](), 0
    for name, array in arrays.items():
        offsets = [end, end + array.nbytes]
        entries[name], end = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}, offsets[1]
    fields = {"spec": dataclasses.asdict(state.spec), "step": state.step, "base": base, "notes": dict(notes or {})}
    described = json.dumps(fields, sort_keys=True)
    metadata = {"format": _FORMAT, "state": described, "sha256": _checksum(entries, described, *arrays.values())}
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".half")
    with half.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
    sync_folder(path.parent)


def read_state(path: Path, *, base: str | None = None) -> tuple[SlotState, dict[str, Any]]:
    """Return a state and its notes.

    Args:
        path: the file.
        base: name of the base that it has to be of; None: any.

    Raises:
        ServiceError: it is damaged, no such file, or of another base.
        FileNotFoundError: it is not there.
    """
    content = path.read_bytes()
    try:
        size = int.from_bytes(content[:8], "little")
        if not 0 < size <= min(len(content) - 8, _MOST_HEADER):
            raise ValueError(f"its header would have {size} bytes")
        entries = json.loads(content[8 : 8 + size])
        metadata, data = entries.pop("__metadata__"), memoryview(content)[8 + size :]
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}")
        described = metadata["state"]
        if _checksum(entries, described, data) != metadata["sha256"]:
            raise ValueError("its checksum is another")
        fields = json.loads(described)
        state = SlotState(LoraSpec(**fields["spec"]), fields["step"], **_arrays(entries, data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"{path.name} is damaged, or no state: {error}", "server") from None
    if base is not None and fields["base"] != base:
        raise ServiceError(f"the state was saved of the base {fields['base']!r}; this service trains {base!r}")
    return state, fields["notes"]


def _arrays(entries: Mapping[str, Any], data: memoryview) -> dict[str, dict[str, Factors]]:
    parts: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for name, entry in entries.items():
        part, rest = name.split("/", 1)
        path, which = rest.rsplit("/", 1)
        start, stop = entry["data_offsets"]
        array = np.frombuffer(data[start:stop], "<f4").reshape(entry["shape"]).copy()
        parts.setdefault(part, {}).setdefault(path, {})[which] = array
    return {part: {path: Factors(**both) for path, both in tree.items()} for part, tree in parts.items()}


def _checksum(entries: Mapping[str, Any], described: str, *data: Any) -> str:
    digest = hashlib.sha256((json.dumps(entries, sort_keys=True) + described).encode())
    for one in data:
        digest.update(one.data if isinstance(one, np.ndarray) else one)
    return digest.hexdigest()
