"""States of models, in memory and on disk: a safetensors file each, whole or not there, refused if a byte has changed.

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
from safetensors import SafetensorError
from safetensors.numpy import load, save

from axlearn_like.layers.wrappers.adapters import Adapter, Factors
from rl.serving.service.durable.journal import sync_folder
from rl.serving.service.messages import LoraSpec, ServiceError

_PARTS = ("factors", "first", "second", "gradients")
_FORMAT = "axl-slot-2"


@dataclasses.dataclass(frozen=True)
class SlotState:
    """A model in host memory: float32 arrays by the paths of their matrices, in the rank of the spec."""

    spec: LoraSpec
    step: int  # optimizer steps taken
    factors: Mapping[str, Factors]  # the adapter, without its scale
    first: Mapping[str, Factors] | None = None  # Adam's means of gradients; None: zero
    second: Mapping[str, Factors] | None = None  # Adam's means of squared gradients; None: zero
    gradients: Mapping[str, Factors] | None = None  # sum since the last step; None: zero

    def adapter(self, alpha: float) -> Adapter:
        """Return the adapter for an engine, with its scale, alpha / rank, in b."""
        scale = np.float32(alpha / self.spec.rank)
        return Adapter({path: Factors(a, b * scale) for path, (a, b) in self.factors.items()})


def write_state(
    path: Path, state: SlotState, notes: Mapping[str, Any] | None = None, *, base: str = "", optimizer: bool = True
) -> None:
    """Write a state, in place of what was there: aside, to disk, then under its name.

    Args:
        path: the file; its folder is made.
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
    fields = {"spec": dataclasses.asdict(state.spec), "step": state.step, "base": base, "notes": dict(notes or {})}
    described = json.dumps(fields, sort_keys=True)
    metadata = {_FORMAT: json.dumps([described, _checksum(described, arrays)])}  # one entry: several have no order
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".half")
    with half.open("wb") as file:
        file.write(save(arrays, metadata))
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
    sync_folder(path.parent)


def read_state(path: Path, *, base: str | None = None) -> tuple[SlotState, dict[str, Any]]:
    """Return a state and its notes.

    Args:
        base: name of the base that it has to be of; None: any.

    Raises:
        ServiceError: it is damaged, no such file, or of another base.
        FileNotFoundError: it is not there.
    """
    content = path.read_bytes()
    try:
        arrays = load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        described, checksum = json.loads(metadata[_FORMAT])
        if _checksum(described, arrays) != checksum:
            raise ValueError("its checksum is another")
        fields = json.loads(described)
        parts: dict[str, dict[str, Factors]] = {}
        for name in (name.removesuffix("/a") for name in sorted(arrays) if name.endswith("/a")):
            part, _, matrix = name.partition("/")
            parts.setdefault(part, {})[matrix] = Factors(arrays[f"{name}/a"], arrays[f"{name}/b"])
        state = SlotState(LoraSpec(**fields["spec"]), fields["step"], **parts)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"{path.name} is damaged, or no state: {error}", "server") from None
    if base is not None and fields["base"] != base:
        raise ServiceError(f"the state was saved of the base {fields['base']!r}; this service trains {base!r}")
    return state, fields["notes"]


def _checksum(described: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(described.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
