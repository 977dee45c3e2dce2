"""XLA's persistent compilation cache: the second start of any command skips compilation."""

import os
from pathlib import Path

import jax


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk; `AXL_COMPILATION_CACHE` overrides the place, "off" disables it.

    The default is `$XDG_CACHE_HOME/axlearn-like/xla` (`~/.cache/...`). Every program is kept, however quick to
    compile: a rollout worker that joins compiles dozens of small ones.
    """
    chosen = os.environ.get("AXL_COMPILATION_CACHE") or directory
    if chosen == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return Path(os.devnull)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(chosen) if chosen else Path(base) / "axlearn-like" / "xla"
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
