"""Private names of jax that have no public counterpart, and all that the stack uses of them.

`tests/test_private_calls.py` fails if another file uses such a name, or if the installed jax is none of `CHECKED`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, override

import jax
from jax._src import compilation_cache, compiler, distributed, lru_cache, xla_bridge

PACKAGE, CHECKED = "jax", ">=0.11.2,<0.13"


def keep_programs_by(get: Callable[[Path], bytes | None], put: Callable[[Path, bytes], object]) -> None:
    """Let jax read and write the files of its cache of compiled programs by these; None: there is no such entry."""

    class Cache(lru_cache.LRUCache):
        @override
        def get(self, key: str) -> bytes | None:
            return get(Path(str(self.path), f"{key}-cache"))

        @override
        def put(self, key: str, value: bytes) -> None:
            if self.eviction_enabled:
                with self.lock:
                    self._evict_if_needed(additional_size=len(value))
            put(Path(str(self.path), f"{key}-cache"), value)

    def open_cache(path: str) -> tuple[Cache, str]:
        return Cache(path, max_size=jax.config.jax_compilation_cache_max_size), path

    compilation_cache.get_file_cache = open_cache
    compilation_cache.reset_cache()  # programs may have been compiled before


def keep_programs_of_every_process() -> None:
    """Keep on disk what this process compiles on CPUs, whichever of several it is; jax lets the first one write."""
    write_of_the_first = compiler._cache_write

    def write(key: str, seconds: float, name: str, backend: Any, executable: Any) -> None:
        if backend.platform != "cpu":
            return write_of_the_first(key, seconds, name, backend, executable)
        try:
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
        except Exception as error:  # same as jax: the program itself is there
            warnings.warn(f"{name} was compiled but not kept: {type(error).__name__}: {error}", stacklevel=2)

    compiler._cache_write = write


def coordination() -> tuple[Any, int, int]:
    """Return the client of jax.distributed's key-value service, this process's index and the number of processes.

    Without jax.distributed: (None, 0, 1). Orbax reads the same state.
    """
    state = distributed.global_state
    return (state.client, int(state.process_id), int(state.num_processes)) if state.client else (None, 0, 1)


def devices_are_open() -> bool:
    """Return True if jax has opened the devices of this process."""
    return xla_bridge.backends_are_initialized()


def give_literals_a_shape() -> None:
    """Give jax's integer literals a shape: the interpreter of kernels asks constant indices for it (jax 0.12)."""
    from jax._src.literals import TypedInt

    setattr(TypedInt, "shape", ())  # noqa: B010
