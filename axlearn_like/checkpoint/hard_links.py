"""A second name for a directory of finished files, so that whoever deletes the first does not take the content."""

import os
import shutil
from pathlib import Path


def link_tree(source: Path, target: Path) -> None:
    """Makes `target` hold the files of `source`, by hard links, or copies where the file system has none.

    Atomic: `target` is there whole or not at all. Nothing is done if it is there.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link)
    partial.rename(target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
