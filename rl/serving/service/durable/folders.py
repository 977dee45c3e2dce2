"""Places of a service's files. Names come from clients: they are encoded, so that none leaves its folder."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import quote, unquote

from mesh import UserError
from rl.serving.service.durable.journal import sync_folder
from rl.serving.service.messages import SavedKind, ServiceError, UnknownId

_NAME = "[A-Za-z0-9_=+-][A-Za-z0-9_.=+-]{0,127}"
_PATH = re.compile(f"tinker://([^/]+)/(weights|sampler_weights)/({_NAME})")
_LONGEST = 200  # bytes of an encoded name; file systems take 255
_ENDING = ".safetensors"
_HALF = ".half"  # ending of files that are not written to their ends


class StatePath(NamedTuple):
    """The parts of `tinker://{model}/{kind}/{name}`."""

    model: str
    kind: SavedKind
    name: str

    def __str__(self) -> str:
        """Return the path as clients write it."""
        return f"tinker://{self.model}/{self.kind}/{self.name}"

    @classmethod
    def of(cls, text: str) -> "StatePath":
        """Return the parts of a path (UnknownId: it has another form)."""
        if (found := _PATH.fullmatch(text)) is None:
            raise UnknownId("path", text)
        return cls(found[1], cast(SavedKind, found[2]), found[3])


def check_name(name: str) -> str:
    """Return a name under which weights may be saved; a ServiceError for any other."""
    if not re.fullmatch(_NAME, name):
        raise ServiceError(
            f"path: {name[:140]!r} is no name; expected 1 to 128 letters, digits and _ = + - and, inside, dots"
        )
    return name


class ServiceFolders:
    """Folders below the one of a service's state."""

    def __init__(self, root: Path):
        """Make the folder, and remove what a killed service was writing (UserError: another service uses it)."""
        self.root = root
        self.adapters = root / "adapters"
        self.adapters.mkdir(parents=True, exist_ok=True)
        self._lock = (root / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{root} is in use by another service; end it first, or choose another folder") from None
        for half in root.rglob("*" + _HALF):
            half.unlink()

    def close(self) -> None:
        """Let another service have the folder."""
        self._lock.close()

    @property
    def journal(self) -> Path:
        """The file of accepted requests."""
        return self.root / "journal"

    def adapter(self, name: str) -> Path:
        """Return the file of weights that samplers draw from."""
        return self.adapters / (encoded(name) + _ENDING)

    def model(self, model: str) -> Path:
        """Return the folder of a model's snapshots, and of the states that it has loaded."""
        return self.root / "models" / encoded(model)

    def snapshot(self, model: str, number: int) -> Path:
        """Return the file of a model's state behind request `number`."""
        return self.model(model) / f"{number:012}{_ENDING}"

    def snapshots(self, model: str) -> list[int]:
        """Return the numbers of a model's snapshots, in order."""
        return sorted(int(path.stem) for path in self.model(model).glob(f"{'[0-9]' * 12}{_ENDING}"))

    def loaded(self, model: str, number: int) -> Path:
        """Return the file of the state that request `number` of a model loads."""
        return self.model(model) / f"loaded-{number:012}{_ENDING}"

    def saved(self, tenant: str, path: StatePath) -> Path:
        """Return the file of a saved state."""
        return self.root / "saved" / encoded(tenant) / encoded(path.model) / path.kind / (encoded(path.name) + _ENDING)

    def every_saved(self, tenant: str) -> list[tuple[StatePath, Path]]:
        """Return the saved states of a tenant, and their files."""
        files = (self.root / "saved" / encoded(tenant)).glob(f"*/*/*{_ENDING}")
        parts = [(file, file.parent.parent.name, file.name.removesuffix(_ENDING)) for file in files]
        return [(StatePath(unquote(m), cast(SavedKind, f.parent.name), unquote(name)), f) for f, m, name in parts]

    def remove_before(self, model: str, number: int) -> None:
        """Remove the snapshots of a model before this one, and the states that requests before it have loaded."""
        for file in self.model(model).iterdir():
            digits = file.stem.removeprefix("loaded-")
            if digits.isdigit() and int(digits) < number:
                file.unlink()

    def keep_models(self, models: Iterable[str]) -> None:
        """Remove the folders of all other models."""
        kept = {encoded(model) for model in models}
        for folder in (self.root / "models").glob("*"):
            if folder.name not in kept:
                shutil.rmtree(folder)

    def remove_model(self, model: str) -> None:
        """Remove the files of a model, but not what it has saved."""
        shutil.rmtree(self.model(model), ignore_errors=True)


def encoded(name: str) -> str:
    """Return a name as one part of a path (ServiceError: it is empty, or too long)."""
    text = quote(name, safe="").replace(".", "%2E")
    if not 0 < len(text) <= _LONGEST:
        raise ServiceError(f"the name {name[:60]!r} is empty or longer than a file's can be")
    return text


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, which stays when the first one is replaced or deleted."""
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(target.name + _HALF)
    half.unlink(missing_ok=True)
    os.link(source, half)
    half.replace(target)
    sync_folder(target.parent)
