"""The code in use as one archive that is named by its content: the same code gives the same name, and is sent once."""

import dataclasses
import gzip
import hashlib
import importlib.util
import io
import os
import struct
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from mesh import UserError
from tools.launch.command import own_files
from tools.launch.launch import Launch
from tools.launch.script import USER_FILES

ROOMS = ("axlearn_like", "experiments", "mesh", "models", "rl", "tools")
_BESIDE = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
_ROOT = Path(__file__).parents[2]
_DIGEST = 16  # characters; a label has at most 63
_CHECKED = 0b11  # flags of byte code that is valid by the hash of its source (PEP 552)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """An archive."""

    digest: str  # digest of the content; compression and byte code are left out
    content: bytes = dataclasses.field(compare=False)  # content of the file
    summary: str  # one line about what is in it

    @property
    def file_name(self) -> str:
        """The name of the file."""
        return f"axl-{self.digest}.tar.gz"


def make_bundle(cfg: Launch.Config, texts: dict[str, str], root: Path = _ROOT) -> Bundle:
    """Pack the rooms as they are on disk, the user's files that the experiment names, and `texts` (path -> content).

    Files whose names begin with a dot and links are left out. Byte code is there for
    a run on this machine alone, whose processes would compile the modules again, each of them those of its own copy.

    Raises:
        UserError: the code was installed without its checkout, two of the user's files have one name, or a name is of
            a module that would not be there.
    """
    if not (root / "pyproject.toml").is_file():
        raise UserError(
            "launch.bundle=True: the code in use is no checkout (no pyproject.toml beside it); run in a checkout, or "
            "set launch.image to an image with the package, and launch.bundle=False"
        )
    files = {path: (root / path).read_bytes() for path in _code(root)}
    named = (cfg.experiment, *cfg.applied) if cfg.experiment is not None else map("{}:".format, own_files(cfg.command))
    own = dict(_own_files(named))
    files |= {f"{USER_FILES}/{name}": content for name, content in own.items()}
    files |= {path: text.encode() for path, text in texts.items()}
    archive = _archive(files)
    digest = hashlib.sha256(archive).hexdigest()[:_DIGEST]
    if cfg.on == "local":
        content = gzip.compress(_archive(files | dict(_byte_code(root, files))), 1, mtime=0)
    else:
        content = gzip.compress(archive, mtime=0)
    own_said = f", {len(own)} of yours ({', '.join(own)})" if own else ""
    said = f"bundle axl-{digest}: {len(files)} files, {len(content) / 1e6:.2f} MB{own_said}; {_changes(root)}"
    return Bundle(digest, content, said)


def _code(root: Path) -> Iterator[str]:
    """Yield the paths of the code, relative to the root."""
    for room in ROOMS:
        for folder, inner, names in os.walk(root / room):
            inner[:] = [name for name in inner if not name.startswith(".") and name != "__pycache__"]
            for name in names:
                path = os.path.join(folder, name)
                hidden = name.startswith(".") or name == "__pycache__" or name.endswith(".pyc")
                if not hidden and os.path.isfile(path) and not os.path.islink(path):
                    yield os.path.relpath(path, root)
    yield from (name for name in _BESIDE if (root / name).is_file())


def _byte_code(root: Path, files: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield what this interpreter has compiled of these files, valid for as long as their content is the same."""
    for name, source in files.items():
        path = root / name
        if path.suffix != ".py" or not path.is_file():
            continue
        cached, stat = Path(importlib.util.cache_from_source(path)), path.stat()
        of_this = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(stat.st_mtime), stat.st_size)
        # Times of sources are whole seconds here: what was compiled in the second of a change may be from before it.
        if not cached.is_file() or cached.stat().st_mtime < int(stat.st_mtime) + 1:
            continue
        if (content := cached.read_bytes()).startswith(of_this):
            checked = importlib.util.MAGIC_NUMBER + struct.pack("<I", _CHECKED) + importlib.util.source_hash(source)
            place = PurePosixPath(name).parent / "__pycache__" / cached.name
            yield place.as_posix(), checked + content[len(of_this) :]


def _own_files(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the user's files that these names mention, by name."""
    seen: dict[str, Path] = {}
    for name in names:
        place = name.rpartition(":")[0]
        if not place or place.partition(".")[0] in ROOMS:
            continue
        if not place.endswith(".py"):
            raise UserError(
                f"{name!r}: the module {place} would not be where the run is; expected FILE.py:FUNCTION, or an image "
                "that has it (launch.image) and launch.bundle=False"
            )
        path = Path(place).expanduser().resolve()
        if seen.setdefault(path.name, path) != path:
            raise UserError(f"{seen[path.name]} and {path} have one name, and the bundle has one folder; rename one")
        yield path.name, path.read_bytes()


def _archive(files: dict[str, bytes]) -> bytes:
    """Return an archive that depends on names and contents alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o644
            archive.addfile(entry, io.BytesIO(files[name]))
    return buffer.getvalue()


def _changes(root: Path) -> str:
    """Say in words which of the code is in no commit."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.rstrip("\n")

    try:
        commit = git("rev-parse", "--short", "HEAD")
        lines = git("status", "--porcelain", "--untracked-files=all", "--", *ROOMS).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "not under git"
    new = sum(line.startswith("??") for line in lines)
    if not lines:
        return f"commit {commit}, nothing changed"
    return f"commit {commit}, {len(lines) - new} changed and {new} untracked files, as they are on disk"
