"""Place for caches that outlive a run: compiled programs, tokenised files."""

import logging
import os
import tempfile
from pathlib import Path

from mesh.files.written import own_folder

_log = logging.getLogger(__name__)


def cache_directory(name: str) -> Path:
    """Return `$XDG_CACHE_HOME/axlearn-like/NAME` (`~/.cache/...`), created if need be.

    Where that cannot be written, as in a container with an arbitrary user id and no home, it is a folder of this user's
    below the temporary directory; a warning says so.

    Raises:
        UnsafeFileError: somebody else has made that folder, or may write it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")
    wanted = home / "axlearn-like" / name
    if _writable(wanted):
        return wanted
    # Programs that are loaded are kept there, and anyone may have made a folder in /tmp.
    other = own_folder(Path(tempfile.gettempdir()) / f"axlearn-like-{os.geteuid()}") / name
    other.mkdir(exist_ok=True)
    _log.warning("cannot write to %s; using %s (set XDG_CACHE_HOME to choose another place)", wanted, other)
    return other


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
