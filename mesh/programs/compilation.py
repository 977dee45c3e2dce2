"""Compilation that is not waited for: XLA's persistent cache, and programs compiled beside others that are in use."""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler  # no public name decides which process writes

from mesh.cache_directory import cache_directory
from mesh.errors import UserError


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk and return the folder.

    `AXL_COMPILATION_CACHE` overrides the folder; "off" disables the cache.

    The default is `cache_directory("xla")`. Every program is kept, however quick to compile: a rollout worker that
    joins compiles dozens of small ones.

    Raises:
        UserError: the chosen folder cannot be made.
    """
    chosen = os.environ.get("AXL_COMPILATION_CACHE") or directory
    if chosen == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return Path(os.devnull)
    if chosen:
        path = Path(chosen)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"AXL_COMPILATION_CACHE={path}: cannot make this folder: {error.strerror}") from error
    else:
        path = cache_directory("xla")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


@contextlib.contextmanager
def without_compilation_cache() -> Generator[None]:
    """Compile everything that is compiled within, and keep nothing of it on disk."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether there is a cache is looked up once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@functools.cache
def cache_programs_of_every_process() -> None:
    """Keep what this process compiles on CPUs, whichever of several it is; JAX keeps what the first one compiles.

    That is enough where the others find it. On CPUs they do not: keys contain a fingerprint of the topology, which
    differs by process (jax 0.12), so all but the first would compile their programs again at every start.
    """
    write_of_the_first = compiler._cache_write

    def write(key: str, seconds: float, name: str, backend: Any, executable: Any) -> None:
        if backend.platform != "cpu":
            return write_of_the_first(key, seconds, name, backend, executable)
        try:
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
        except Exception as error:  # as JAX does: the program itself is there
            warnings.warn(f"{name} was compiled but not kept: {type(error).__name__}: {error}", stacklevel=2)

    compiler._cache_write = write


class LateProgram:
    """A program for so many rows that is compiled in a thread while it is wanted; another serves till then.

    The compilation begins when it is wanted for the second time: the first answer does not wait beside it.
    """

    def __init__(self, rows: int, compile_it: Callable[[], None]):
        self.rows, self._compile = rows, compile_it
        self._compiled: Future[None] | None = None
        self._wanted = False

    def ready(self) -> bool:
        """Return True if it is compiled. Raises what the compiler raises."""
        if not self._wanted:
            self._wanted = True
            return False
        if self._compiled is None:
            thread = ThreadPoolExecutor(1, "compile")
            self._compiled = thread.submit(self._compile)
            thread.shutdown(wait=False)
        if self._compiled.done():
            self._compiled.result()
            return True
        return False
