"""Directories of exports and imports under way, and the journal by which an import goes on."""

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from axlearn_like.checkpoint.plain.chunks import sync
from axlearn_like.run.disk import is_full_disk
from mesh.errors import UserError
from models.huggingface.checkpoints.plan import Chunk, ImportPlan
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files.safetensors import SafetensorsWriter
from models.huggingface.tensor_files.same_file import SameFile

_JOURNAL = "journal.jsonl"


class Written(NamedTuple):
    """A chunk that is on the disk.

    Attributes:
        checksum: its part of the parameter's checksum.
        size: bytes of the parameter.
        digest: the file's digest.
    """

    checksum: int
    size: int
    digest: str


class Journal:
    """Chunks that are on the disk, in a file of one line each."""

    def __init__(self, path: Path, header: Mapping[str, Any]):
        self.path, self._header, self._lock = path, dict(header), threading.Lock()
        self._file = open(path, "a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConversionError(f"{path.parent}: another import of this is under way") from None
        self._file.seek(0)
        self._done: dict[str, Written] = {}
        self.nbytes = 0  # bytes of the written chunks
        text = self._file.read()
        complete = text[: text.rfind("\n") + 1]  # a cut-off last line is ignored
        self._file.truncate(len(complete.encode()))
        lines = complete.splitlines()
        self.fits = bool(lines) and json.loads(lines[0]) == self._header
        if self.fits:
            for line in lines[1:]:
                name, *written = json.loads(line)
                self._know(name, Written(*written))

    def start(self) -> None:
        """Begin with no chunk."""
        self._file.truncate(0)
        self._done, self.nbytes = {}, 0
        self._append(self._header)

    def __contains__(self, chunk: Chunk) -> bool:
        return _key(chunk) in self._done

    def add(self, chunk: Chunk, written: Written) -> None:
        """Note a chunk that is on the disk."""
        with self._lock:
            self._know(_key(chunk), written)
            self._append([_key(chunk), *written])

    def sums(self, plan: ImportPlan) -> tuple[dict[str, int], dict[str, dict[str, str]]]:
        """Return the checksum of each parameter, and the digest of each of its files."""
        checksums, digests = dict.fromkeys(plan.layouts, 0), {name: dict[str, str]() for name in plan.layouts}
        for chunk in plan.chunks:
            written = self._done[_key(chunk)]
            checksums[chunk.parameter] += written.checksum
            digests[chunk.parameter][chunk.name] = written.digest
        return checksums, digests

    def close(self) -> None:
        """Remove the file; all is done."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def release(self) -> None:
        """Close the file and keep it."""
        self._file.close()

    def _know(self, name: str, written: Written) -> None:
        self._done[name] = written
        self.nbytes += written.size

    def _append(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()


def _key(chunk: Chunk) -> str:
    return f"{chunk.parameter}/{chunk.name}"


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
    work = target.parent / f".{target.name}.exporting"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        if not filled:
            check_space(target, work, needed)
        made = ExportDirectory(target, work, filled=filled)
        try:
            yield made
            if filled:
                made.compare()
        except ConversionError as differs:
            raise (taken(target, what, f" ({differs})") if filled else differs) from None
        if filled:
            shutil.rmtree(work)
            return
        sync([*(file for file in work.iterdir() if file.suffix != ".safetensors"), work])
        _take_name(work, target)
    except BaseException as error:
        _give_up(work, target, needed, error)
        raise


@contextlib.contextmanager
def import_directory(
    target: Path, header: Mapping[str, Any], nbytes: int, prepare: Callable[[Path], object]
) -> Iterator[tuple[Path, Journal]]:
    """Yield the directory of work, which gets the name of `target` in the end, and its journal.

    They are begun again unless a killed import of the same files left them. After an error the directory is removed;
    after a kill, or Ctrl-C, it stays, and the next import continues from it.

    Args:
        target: a directory that does not exist, or is empty.
        header: values by which this import is told from another.
        nbytes: bytes needed, for the message of a full disk.
        prepare: fills a directory of work that is new.

    Raises:
        ConversionError: another import of it is under way, or it cannot be written.
    """
    work = target.parent / f".{target.name}.importing"
    try:
        work.mkdir(parents=True, exist_ok=True)
        journal = Journal(work / _JOURNAL, header)
    except OSError as error:
        raise ConversionError(f"{target}: cannot be written ({error.strerror})") from None
    try:
        if not journal.fits:
            for entry in work.iterdir():
                if entry.name != _JOURNAL:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            prepare(work)
            journal.start()
        yield work, journal
        journal.close()
        _take_name(work, target)
    except Exception as error:
        _give_up(work, target, nbytes, error)
        raise
    finally:
        journal.release()


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
