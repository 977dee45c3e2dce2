"""XLA's persistent compilation cache: the second start of any command skips compilation."""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
from pathlib import Path

import jax

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
