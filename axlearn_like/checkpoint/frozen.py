"""Frozen parameters in checkpoints: written once, and hard links in every later step, which stays whole by itself.

This file imports Orbax; it is imported when something is saved.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any, override

import orbax.checkpoint as ocp

from mesh.files.hard_links import link_file


@dataclasses.dataclass
class FrozenArgs(ocp.args.CheckpointArgs):
    """Frozen parameters to save: the files of an older step, which has the same ones, or else the arrays."""

    arrays: Any  # nested dict
    files: Path | None = None  # folder of this item in the older step; None: the arrays are written


class FrozenHandler(ocp.CheckpointHandler):
    """Handler whose files are written when `save` returns; Orbax's own handler restores the item."""

    def __init__(self) -> None:
        self._arrays = ocp.StandardCheckpointHandler()
        self._written: set[str] = set()  # folders of arrays that are not linked, until `finalize`

    @override
    def save(self, directory: Any, args: FrozenArgs) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Link or write into `directory`, which is the step's until the step is complete."""
        if args.files is not None:
            try:
                if ocp.utils.is_primary_host(0):
                    shutil.copytree(args.files, directory, copy_function=link_file, dirs_exist_ok=True)
                return
            except (FileNotFoundError, shutil.Error):  # another run has deleted that step since
                if Path(args.files).exists():
                    raise
                for path in Path(directory).iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._arrays.save(directory, args=ocp.args.StandardSave(args.arrays))  # pyright: ignore
        self._written.add(str(directory))

    @override
    def finalize(self, directory: Any) -> None:
        """Merge what the processes have written; Orbax calls it on the first one, once all have saved."""
        if str(directory) in self._written:
            self._written.remove(str(directory))
            self._arrays.finalize(directory)

    @override
    def restore(self, directory: Any, args: Any = None) -> Any:
        """Raise: Orbax's own handler reads the item."""
        raise NotImplementedError


ocp.args.register_with_handler(FrozenHandler, for_save=True, for_restore=True)(FrozenArgs)
