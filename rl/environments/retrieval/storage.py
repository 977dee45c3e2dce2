"""A file of an index: one header in JSON, the arrays as they lie in memory, and a checksum of all."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from mesh.errors import UserError
from mesh.files.written import replace_file
from rl.environments.retrieval.clusters import Array

_MAGIC = b"axl-tenant-index-1\n"


def write_arrays(path: str | os.PathLike[str], about: dict[str, Any], arrays: dict[str, Array]) -> None:
    """Write a file in place of what has its name, whole or not at all (OSError: the old one stays)."""
    listed = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"about": about, "arrays": listed}).encode() + b"\n"
    content = b"".join([_MAGIC, header, *(np.ascontiguousarray(array).tobytes() for array in arrays.values())])
    replace_file(path, content + hashlib.sha256(content).digest())


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return what was written (UserError: it is no such file, or damaged; OSError: it cannot be read)."""
    content = Path(path).read_bytes()
    if not content.startswith(_MAGIC):
        raise UserError(f"{path} is no index; expected a file that TenantIndex.save has written")
    view, digest = memoryview(content)[:-32], content[-32:]
    if hashlib.sha256(view).digest() != digest:
        raise UserError(f"{path} is damaged: its checksum is another; expected the file as it was written")
    start = content.index(b"\n", len(_MAGIC)) + 1
    header = json.loads(content[len(_MAGIC) : start])
    arrays: dict[str, Array] = {}
    for name, dtype, shape in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(view, dtype, count, start).reshape(shape).copy()
        start += arrays[name].nbytes
    return header["about"], arrays
