"""Executables that were compiled elsewhere, by what they were lowered from: a program that differs is compiled.

`AXL_EXECUTABLES` names their folder. Loading one may run code that its file holds: it must be the user's own.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

VARIABLE = "AXL_EXECUTABLES"


def executable_name(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> str:
    """Return the name of a program's file: of its text, the devices, and what has compiled it."""
    kind = devices[0].device_kind
    parts = (lowered.as_text(), kind, str(len(devices)), jax.__version__, version("jaxlib"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


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
        path.write_bytes(content)
        return path

    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(keep, programs))
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        reset_cache()


def find_executable(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> jax.stages.Compiled | None:
    """Return the executable of a program for exactly these devices, loaded; None: there is none, or none that loads."""
    folder = os.environ.get(VARIABLE)
    if not folder or not devices:
        return None
    path = Path(folder) / executable_name(lowered, devices)
    if not path.is_file():
        return None
    in_tree = jax.tree_util.tree_structure(lowered.args_info)
    try:
        return deserialize_and_load(path.read_bytes(), in_tree, lowered.out_tree, execution_devices=devices)
    except (jax.errors.JaxRuntimeError, pickle.UnpicklingError, ValueError, EOFError) as error:
        print(f"axl: {path} is not used: {error}")  # of another machine, say: it is compiled here
        return None
