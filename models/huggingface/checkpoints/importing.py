"""Import: the tensors of a Hugging Face directory as the checkpoint of step 0 of a directory here.

Tensors are never held: blocks of the mapped files are summed for the manifest and written as they are. A chunk is on
the disk before the journal says so: an import that is killed goes on after the last one. The directory gets its name
when everything is there.
"""

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from axlearn_like.checkpoint import chunks as files
from axlearn_like.checkpoint.direct_file import DirectFile
from axlearn_like.config import to_text
from axlearn_like.run.disk import is_full_disk
from mesh.errors import UserError
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.plan import Chunk, ImportPlan, converted, identity, plan_import
from models.huggingface.rows import ConversionError

ORIGINAL = "huggingface"  # files of the model besides its weights, as they came
RECORD = "import.json"
_JOURNAL, _CHECKPOINTS = "journal.jsonl", "checkpoints"
_BLOCK = 4 << 20  # bytes that are summed and written at a time: they stay in the processor's cache
_THREADS = 4
_SPARE = 64 << 20  # bytes left free


class Imported(NamedTuple):
    """The result of an import.

    Attributes:
        directory: that was made.
        tensors: that were read.
        nbytes: of the parameters.
        resumed: bytes of it that an earlier, killed import had written.
    """

    directory: Path
    tensors: int
    nbytes: int
    resumed: int


def import_checkpoint(
    source: HuggingFaceDirectory,
    target: Path,
    *,
    dtype: str | None = None,
    chunk_bytes: int = files.CHUNK_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Imported:
    """Write `target`: `checkpoints/0`, `config.txt` of the decoder, and the other files of the model.

    Args:
        source: checked.
        target: a directory that is not there, or empty.
        dtype: of all parameters; None: the one that holds each parameter's tensors exactly.
        chunk_bytes: of a file of numbers, about.
        progress: called with the bytes written and all bytes.

    Raises:
        UserError: the target is there, or another import of it under way; a full disk; damage. Nothing stays behind.
    """
    target = target.expanduser().absolute()
    check_free(target, "axl convert import")
    source.check_copies()
    plan = plan_import(source, dtype, chunk_bytes)
    work = target.parent / f".{target.name}.importing"
    with _opened(work, target, source, plan, dtype) as journal:
        _check_space(target, plan, journal)
        resumed = journal.nbytes
        _write_chunks(work / _CHECKPOINTS / "0" / "params", plan, journal, progress)
        files.finish(work / _CHECKPOINTS, plan.layouts, journal.checksums(plan), journal.digests(plan))
        _write_record(work, source, dtype)
        journal.close()
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()  # an empty one
        work.rename(target)
        files.sync([target.parent])
    return Imported(target, len(source.expected), plan.nbytes, resumed)


def check_free(target: Path, what: str) -> None:
    """Refuse a target that is there with something in it (ConversionError)."""
    if target.is_dir() and any(target.iterdir()):
        raise ConversionError(f"{target}: {what} expects a directory that is not there yet, or empty")
    if target.exists() and not target.is_dir():
        raise ConversionError(f"{target}: expected a directory, got a file")


class Written(NamedTuple):
    """A chunk that is on the disk.

    Attributes:
        checksum: its part of the parameter's.
        size: bytes of the parameter.
        digest: of the file.
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
        self.nbytes = 0  # of the chunks that are written
        text = self._file.read()
        complete = text[: text.rfind("\n") + 1]  # of a last line that was cut off nothing is known
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

    def checksums(self, plan: ImportPlan) -> dict[str, int]:
        """Return the sum of each parameter's chunks."""
        sums = dict.fromkeys(plan.layouts, 0)
        for chunk in plan.chunks:
            sums[chunk.parameter] += self._done[_key(chunk)].checksum
        return sums

    def digests(self, plan: ImportPlan) -> dict[str, dict[str, str]]:
        """Return the digest of each parameter's files."""
        found: dict[str, dict[str, str]] = {name: {} for name in plan.layouts}
        for chunk in plan.chunks:
            found[chunk.parameter][chunk.name] = self._done[_key(chunk)].digest
        return found

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


@contextlib.contextmanager
def _opened(
    work: Path, target: Path, source: HuggingFaceDirectory, plan: ImportPlan, dtype: str | None
) -> Iterator[Journal]:
    """Yield the journal of the directory of work, begun again unless a killed import of the same files left it.

    After an error the directory is removed; after a kill, or Ctrl-C, it is there to go on from.
    """
    header = {"files": identity(source), "decoder": to_text(source.decoder), "dtype": dtype, "plan": plan.digest}
    header["lines"] = ["chunk", *Written._fields]
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
            files.create(work / _CHECKPOINTS, plan.layouts)
            journal.start()
        yield journal
    except Exception as error:
        shutil.rmtree(work, ignore_errors=True)
        if is_full_disk(error):
            raise ConversionError(
                f"{target}: no space left on the device; expected {plan.nbytes:,} bytes for the parameters. Nothing is "
                "left of the import"
            ) from error
        if isinstance(error, OSError) and not isinstance(error, UserError):
            raise ConversionError(f"{target}: cannot be written ({error})") from error
        raise
    finally:
        journal.release()


def _check_space(target: Path, plan: ImportPlan, journal: Journal) -> None:
    needed = plan.nbytes - journal.nbytes + _SPARE
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ConversionError(f"{target}: no space left: expected {needed:,} bytes free, got {free:,}")


def _write_chunks(params: Path, plan: ImportPlan, journal: Journal, progress: Callable[[int, int], None]) -> None:
    """Write every chunk that the journal does not have, several at a time."""
    left = [chunk for chunk in plan.chunks if chunk not in journal]
    total, lock, stop = plan.nbytes, threading.Lock(), threading.Event()

    def work(number: int) -> None:
        if stop.is_set():
            return
        if number + _THREADS < len(left):
            _read_ahead(left[number + _THREADS])
        journal.add(left[number], _write_chunk(params, plan, left[number]))
        with lock:
            progress(journal.nbytes, total)

    for chunk in left[:_THREADS]:
        _read_ahead(chunk)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="import") as pool:
        try:
            for done in [pool.submit(work, number) for number in range(len(left))]:
                done.result()
        except BaseException:
            stop.set()
            raise


def _write_chunk(params: Path, plan: ImportPlan, chunk: Chunk) -> Written:
    """Write one chunk; returns what is to be known of it once it is on the disk."""
    layout = plan.layouts[chunk.parameter]
    folder = params / files.directory_name(chunk.parameter)
    checksum, digest = 0, xxhash.xxh3_64()
    with DirectFile(folder / f"{chunk.name}.part") as file:
        for part in chunk.parts:
            assert file.size == part.place, chunk
            each = max(1, _BLOCK * part.piece.apart[0] // max(1, part.source.nbytes))
            for row in range(part.rows.start, part.rows.stop, each):
                block = converted(part.read(row, min(row + each, part.rows.stop)), layout.dtype)
                checksum += layout.checksum(block, part.piece.index, row)
                digest.update(block.view("uint8") if block.ndim else block.tobytes())
                file.append(block)
        size = file.size
        rest = bytes(files.chunk_bytes(layout) - size)  # the last of an axis may be shorter
        digest.update(rest)
        file.append(rest)
    os.rename(folder / f"{chunk.name}.part", folder / chunk.name)
    return Written(checksum % 2**32, size, digest.hexdigest())


def _read_ahead(chunk: Chunk) -> None:
    """Ask the operating system to read what the chunk is made of."""
    if not hasattr(os, "posix_fadvise"):
        return
    for part in chunk.parts:
        for stored in part.source.stored(*part.piece.spanned(part.source.shape[0], part.rows.start, part.rows.stop)):
            file = os.open(stored.path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, stored.start, stored.nbytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)


def _write_record(work: Path, source: HuggingFaceDirectory, dtype: str | None) -> None:
    """Write the decoder's config, the model's other files, and what an export needs to know besides."""
    (work / "config.txt").write_text(to_text(source.decoder))
    original = work / ORIGINAL
    shutil.rmtree(original, ignore_errors=True)
    original.mkdir()
    for file in source.kept_files():
        shutil.copyfile(file, original / file.name)
    kinds = [source.tensors[name].dtype for name in source.expected]
    usual = max(sorted(set(kinds)), key=kinds.count)
    others = {name: source.tensors[name].dtype for name in source.expected if source.tensors[name].dtype != usual}
    record = {
        "architecture": source.architecture.name,
        "source": str(source.path),
        "dtype": dtype,
        "tensor_dtype": usual,
        "other_dtypes": others,
    }
    (work / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    files.sync([work / "config.txt", work / RECORD, original, *original.iterdir(), work])
