"""XLA's persistent cache of compiled programs, and compilation beside what is in use.

The cache has this user's entries alone. JAX loads whatever has the name of a key, and loading a program may run code
that it holds: who may write the folder, or could at any time, can have put a program there.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import errno
import functools
import logging
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import jax

from mesh.errors import UserError
from mesh.files.bounded import BoundsError, check_regular
from mesh.files.cache_directory import cache_directory
from mesh.files.written import UnsafeFileError, foreign_owner, me, owner, replace_file
from mesh.programs.jax_internals import keep_programs_by, keep_programs_of_every_process


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


_log = logging.getLogger(__name__)
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def use_own_entries(folder: Path, *, chosen: bool) -> None:
    """Let JAX load this user's entries of a folder alone.

    On a disk that gives all files one owner, such as a bucket's, it loads all: who may write that runs the job anyway.

    Args:
        folder: it exists.
        chosen: the user has named it, so that its mode is theirs to change; else others lose their right to write.

    Raises:
        UnsafeFileError: it belongs to somebody else, or others may write it.
    """
    found = folder.stat()
    if (other := foreign_owner(folder)) is not None:
        raise UnsafeFileError(
            f"compiled programs in {folder}: it belongs to {other}, whose programs could run code as {me()}; expected "
            "a folder of your own in AXL_COMPILATION_CACHE, or off"
        )
    own = found.st_uid == os.geteuid()
    if own and stat.S_IMODE(found.st_mode) & _OTHERS:
        if chosen:
            raise UnsafeFileError(
                f"compiled programs in {folder}: others may write it, whose programs could run code as {me()}; "
                f"expected mode 0755 or less (chmod go-w {folder}), or another folder in AXL_COMPILATION_CACHE"
            )
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    keep_programs_by(load_own if own else _load, replace_file)


def load_own(path: Path) -> bytes | None:
    """Return the content of an entry; None: there is none that belongs to this user and that no other may write."""
    try:
        return _read_own(path)
    except FileNotFoundError:
        return None
    except UnsafeFileError as error:
        _log.warning("%s; the program is compiled instead", error)
        return None


def _load(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _read_own(path: Path) -> bytes:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise UnsafeFileError(f"{path} is a link or a socket; expected a file of {me()}") from None
        raise
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        try:
            check_regular(found.st_mode)
        except BoundsError as error:
            raise UnsafeFileError(f"{path}: {error}") from None
        if found.st_uid != os.geteuid():
            raise UnsafeFileError(f"{path} belongs to {owner(found.st_uid)}; expected a file of {me()}")
        if stat.S_IMODE(found.st_mode) & _OTHERS:
            raise UnsafeFileError(f"{path} may be written by others; expected mode 0600 or 0644")
        return file.read()
