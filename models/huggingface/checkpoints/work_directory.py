"""Directories of exports and imports under way, which get their names when all is written."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from axlearn_like.checkpoint.plain.chunks import sync
from axlearn_like.run.disk import is_full_disk
from mesh.errors import UserError
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files.safetensors import SafetensorsWriter, SameFile


def check_free(target: Path, what: str, *, content: str) -> bool:
    """Refuse a target that is of something else (ConversionError); True if it may be of the same command before.

    Args:
        target: a directory, that does not exist in the usual case.
        what: what is to be written there, for the message.
        content: a file that is in each directory of that kind.
    """
    try:
        if os.path.lexists(target) and not target.is_dir():
            found = "a file" if target.exists() else "a link to nothing"
            raise ConversionError(f"{target}: expected a directory, got {found}")
        filled = target.is_dir() and any(target.iterdir())
        if filled and not (target / content).is_file():
            raise taken(target, what)
        with contextlib.suppress(FileNotFoundError):
            os.stat(target.with_name(f".{target.name}.importing"))  # the longest name that is needed
    except OSError as error:
        raise ConversionError(f"{target}: cannot be written ({error.strerror or error})") from None
    return filled


def check_space(target: Path, folder: Path, needed: int) -> None:
    """Refuse a disk of a folder that has not so many bytes for `target` (ConversionError)."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ConversionError(f"{target}: no space left: expected {needed:,} bytes free, got {free:,}")


def taken(target: Path, what: str, why: str = "") -> ConversionError:
    """Return the error of a target that is of something else."""
    said = f"{target}: {what} expects a directory that does not exist yet, or is empty"
    return ConversionError(f"{said}; this one is of another{why}" if why else said)


class ExportDirectory:
    """The directory in which an export is made; or, where the target is filled, with which it is compared."""

    def __init__(self, target: Path, work: Path, *, filled: bool):
        self.path, self.before, self._target = work, filled, target

    def tensors(self, name: str, described: Mapping[str, tuple[str, tuple[int, ...]]]) -> SafetensorsWriter:
        """Return the writer of a file of tensors (ConversionError: another is there)."""
        if not self.before:
            return SafetensorsWriter(self.path / name, described)
        if not (self._target / name).is_file():
            raise ConversionError(f"there is no {name}")
        return SafetensorsWriter(self.path / name, described, SameFile(self._target / name))

    def compare(self) -> None:
        """Compare the other files (ConversionError)."""
        for file in self.path.iterdir():
            there = self._target / file.name
            if not there.is_file() or there.read_bytes() != file.read_bytes():
                raise ConversionError(f"{there} differs")


@contextlib.contextmanager
def export_directory(target: Path, needed: int, what: str, *, content: str) -> Iterator[ExportDirectory]:
    """Yield a directory that gets the name of `target` in the end; after an error it is removed.

    A target that an export has filled is compared instead: the same command finds that all is done.

    Args:
        target: a directory that does not exist yet, is empty, or is of the same export.
        needed: bytes.
        what: what is to be written there, for the message.
        content: a file that is in each directory of that kind.

    Raises:
        ConversionError: fewer than `needed` bytes are free, it cannot be written, or is of something else.
    """
    filled = check_free(target, what, content=content)
    with _work(target, 0 if filled else needed, "exporting") as work:
        made = ExportDirectory(target, work, filled=filled)
        try:
            yield made
            if filled:
                made.compare()
        except ConversionError as differs:
            raise (taken(target, what, f" ({differs})") if filled else differs) from None
        if not filled:
            sync([*(file for file in work.iterdir() if file.suffix != ".safetensors"), work])
            _take_name(work, target)


@contextlib.contextmanager
def import_directory(target: Path, needed: int) -> Iterator[Path]:
    """Yield a directory that gets the name of `target` in the end; after an error it is removed.

    Args:
        target: a directory that does not exist, or is empty.
        needed: bytes.

    Raises:
        ConversionError: another import of it is under way, fewer than `needed` bytes are free, or it cannot be written.
    """
    with _work(target, needed, "importing") as work:
        yield work
        _take_name(work, target)


@contextlib.contextmanager
def _work(target: Path, needed: int, what: str) -> Iterator[Path]:
    """Yield an empty directory beside the target, which one process has at a time; it is removed in the end."""
    work = target.parent / f".{target.name}.{what}"
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise ConversionError(f"{target}: cannot be written ({error.strerror})") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConversionError(f"{work}: another process is {what} it") from None
        try:
            for left in work.iterdir():  # files of an import that was killed
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            check_space(target, work, needed)
            yield work
        except BaseException as error:
            _give_up(work, target, needed, error)
            raise
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)


def _take_name(work: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        target.rmdir()  # an empty one
    work.rename(target)
    sync([target.parent])


def _give_up(work: Path, target: Path, nbytes: int, error: BaseException) -> None:
    """Remove the directory of work; ConversionError where the disk is why."""
    shutil.rmtree(work, ignore_errors=True)
    if is_full_disk(error):
        said = f"{target}: no space left on the device; expected {nbytes:,} bytes. Nothing is left of it"
        raise ConversionError(said) from error
    if isinstance(error, OSError) and not isinstance(error, UserError):
        raise ConversionError(f"{target}: cannot be written ({error})") from error
