"""A second name for a directory of finished files: the content outlives the deletion of the first."""

import os
import shutil
from pathlib import Path


def link_tree(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source`, by hard links, or copies where the file system has none.

    Atomic: `target` exists completely or not at all. Nothing is done if it exists.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=link_file)
    partial.rename(target)


def link_file(source: str, target: str) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
