"""XLA's persistent cache of compiled programs, and compilation beside what is in use."""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import jax

from mesh.errors import UserError
from mesh.files.cache_directory import cache_directory
from mesh.programs.jax_internals import keep_programs_of_every_process
from mesh.programs.own_cache import use_own_entries


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk and return the folder.

    `AXL_COMPILATION_CACHE` overrides the folder; "off" disables the cache.

    The default is `cache_directory("xla")`. Every program is kept, however quick to compile: a rollout worker that
    joins compiles dozens of small ones.

    Raises:
        UserError: the chosen folder cannot be made, belongs to somebody else, or others may write it.
    """
    chosen = os.environ.get("AXL_COMPILATION_CACHE") or directory
    if chosen == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return Path(os.devnull)
    if chosen:
        path = Path(chosen)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UserError(f"AXL_COMPILATION_CACHE={path}: cannot make this folder: {error.strerror}") from error
    else:
        path = cache_directory("xla")
    use_own_entries(path, chosen=bool(chosen))
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


@functools.cache
def cache_programs_of_every_process() -> None:
    """Keep what this process compiles on CPUs, whichever of several it is; JAX keeps what the first one compiles.

    That is enough where the others find it. On CPUs they do not: keys contain a fingerprint of the topology, which
    differs by process (jax 0.12), so all but the first would compile their programs again at every start.
    """
    keep_programs_of_every_process()


@contextlib.contextmanager
def compiling_beside(compilations: Iterable[Callable[[], None]]) -> Generator[None]:
    """Call functions that each compile a program, one after another in a thread, until the end of the block.

    One that fails is reported, and the others go on: what it is for is served by other programs.
    """
    ended = threading.Event()

    def run() -> None:
        for compile_one in compilations:
            if ended.is_set():
                return
            try:
                compile_one()
            except Exception as error:
                print(f"axl: a program could not be compiled: {type(error).__name__}: {error}", flush=True)

    # Not a daemon: the interpreter must not end in the middle of a compilation.
    thread = threading.Thread(target=run, name="compile")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
