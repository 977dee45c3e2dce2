"""Place for caches that outlive a run: compiled programs, tokenised files."""

import logging
import os
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)


def cache_directory(name: str) -> Path:
    """Return `$XDG_CACHE_HOME/axlearn-like/NAME` (`~/.cache/...`), created if need be.

    Where that cannot be written, as in a container with an arbitrary user id and no home, it is a folder of this user's
    below the temporary directory; a warning says so.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")
    wanted = home / "axlearn-like" / name
    if _writable(wanted):
        return wanted
    other = Path(tempfile.gettempdir()) / f"axlearn-like-{os.getuid()}" / name
    other.mkdir(parents=True, exist_ok=True, mode=0o700)
    _log.warning("cannot write to %s; using %s (set XDG_CACHE_HOME to choose another place)", wanted, other)
    return other


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
