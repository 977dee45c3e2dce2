"""Versions of the policy that a reference is reset to: kept from the trainer's checkpoints, on the run's disk."""

import shutil
from pathlib import Path

from axlearn_like.checkpoint.versions import list_steps
from mesh import UserError
from mesh.files.hard_links import link_tree

_KEPT = 2  # the one in use, and the one before: a trainer may go back to an update that compares with it


class SavedVersions:
    """Versions in a folder of their own, since the trainer removes its older checkpoints. Files are linked."""

    def __init__(self, checkpoints: Path, folder: Path):
        self._checkpoints, self._folder = checkpoints, folder

    def path(self, version: int) -> Path:
        """Return the checkpoint of a version that is kept."""
        return self._folder / str(version)

    def keep(self, version: int) -> bool:
        """Keep a version; False while its checkpoint is written (UserError: neither kept nor among checkpoints)."""
        if self.path(version).exists():
            return True
        steps = list_steps(self._checkpoints) if self._checkpoints.is_dir() else []
        if version not in steps:
            if steps and steps[-1] > version:
                raise UserError(
                    f"version {version}, which the reference is reset to, is gone: {self.path(version)} is not there, "
                    f"and {self._checkpoints} has only {', '.join(map(str, steps))}; resume from an older checkpoint, "
                    "or without fleet.reference"
                )
            return False
        link_tree(self._checkpoints / str(version), self.path(version))
        for older in sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())[:-_KEPT]:
            shutil.rmtree(self.path(older), ignore_errors=True)
        return True
