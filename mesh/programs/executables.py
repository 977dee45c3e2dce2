"""Executables that were compiled elsewhere, by what they compute (digest.py): a program that differs is compiled.

`AXL_EXECUTABLES` names their folder. Loading one may run code that its file holds: it must be the user's own.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import functools
import hashlib
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from mesh.devices import processor
from mesh.programs.compilation import without_compilation_cache
from mesh.programs.digest import program_digest

VARIABLE = "AXL_EXECUTABLES"
_DIGEST = 32  # bytes of the content's SHA-256, which the file begins with


def executable_name(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> str:
    """Return the name of a program's file: of what it computes, the devices, and what has compiled it.

    "cpu" is the kind of every CPU, and a program with instructions that this one lacks may load and then be killed, so
    names for CPUs contain the features of the processor.
    """
    kind = devices[0].device_kind
    features = _processor() if devices[0].platform == "cpu" else ""
    parts = (program_digest(lowered.as_text()), kind, features, str(len(devices)), jax.__version__, version("jaxlib"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _processor() -> str:
    """Return the architecture of this machine's processor, and its features where the system lists them."""
    known = processor()
    features = sorted(known.get("flags", known.get("Features", "")).split())
    return " ".join([platform.machine(), *features])


def keep_executables(programs: Sequence[jax.stages.Lowered], devices: Sequence[Any], folder: Path) -> list[Path]:
    """Compile programs, as many at a time as there are cores, and write them for `find_executable`.

    What comes from the compilation cache cannot be written again (on CPUs its functions are missing), so it is not
    asked.

    Returns:
        Their files.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def keep(lowered: jax.stages.Lowered) -> Path:
        content, _, _ = serialize(lowered.compile())
        path = folder / executable_name(lowered, devices)
        path.write_bytes(hashlib.sha256(content).digest() + content)
        return path

    with without_compilation_cache(), ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(keep, programs))


def find_executable(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> jax.stages.Compiled | None:
    """Return the executable of a program for exactly these devices, loaded; None: there is none, or none that loads."""
    folder = os.environ.get(VARIABLE)
    if not folder or not devices:
        return None
    path = Path(folder) / executable_name(lowered, devices)
    if not path.is_file():
        return None
    kept = path.read_bytes()
    digest, content = kept[:_DIGEST], kept[_DIGEST:]
    in_tree = jax.tree_util.tree_structure(lowered.args_info)
    try:
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("it is damaged: its content is not what its digest says")
        return deserialize_and_load(content, in_tree, lowered.out_tree, execution_devices=devices)
    except Exception as error:  # whatever the loader raises, the program can be compiled here
        print(f"axl: {path} is not used: {type(error).__name__}: {error}")
        return None
