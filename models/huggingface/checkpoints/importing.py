"""Import: the tensors of a Hugging Face directory as the checkpoint of step 0 of a model directory of ours.

Tensors are never held: blocks of the mapped files are summed for the manifest and written as they are. The directory
gets its name when everything is written.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from axlearn_like.checkpoint.plain import chunks as files
from axlearn_like.checkpoint.plain.direct_file import DirectFile
from axlearn_like.config import to_text
from mesh.files.bounded import read_json
from models.huggingface.checkpoints.directory import ORIGINAL, RECORD, HuggingFaceDirectory
from models.huggingface.checkpoints.plan import Chunk, ImportPlan, converted, identity, plan_import
from models.huggingface.checkpoints.work_directory import check_free, import_directory, taken
from models.huggingface.rows import ConversionError

WHAT = "axl convert import"
_CHECKPOINTS = "checkpoints"
_BLOCK = 4 << 20  # bytes that are summed and written at a time: they stay in the processor's cache
_THREADS = 4
_SPARE = 64 << 20  # bytes left free


class Imported(NamedTuple):
    """The result of an import."""

    directory: Path  # the new directory
    tensors: int  # number of tensors that were read
    nbytes: int  # bytes of the parameters
    before: bool = False  # True if all of it was there: nothing was written


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
        target: a directory that does not exist, is empty, or is of the same import.
        dtype: the dtype of all parameters, but that what layers compute with unrounded (`Layer.unrounded`) is not
            rounded to bfloat16; None: the one that holds each parameter's tensors exactly.
        chunk_bytes: approximate size of a file of numbers.
        progress: callback with the bytes written and all bytes.

    Raises:
        UserError: the target exists, or another import of it is under way; a full disk; damage. Nothing stays behind.
    """
    target = target.expanduser().absolute()
    filled = check_free(target, WHAT, content=RECORD)
    source.check_copies()
    plan = plan_import(source, dtype, chunk_bytes)
    header = {"files": identity(source), "decoder": to_text(source.decoder), "dtype": dtype}
    if filled:
        _check_same(target, header)
        return Imported(target, len(source.expected), plan.nbytes, before=True)
    with import_directory(target, plan.nbytes + _SPARE) as work:
        params = files.create(work / _CHECKPOINTS, plan.layouts)
        written = _write_chunks(params, plan, progress)
        checksums, digests = dict.fromkeys(plan.layouts, 0), {name: dict[str, str]() for name in plan.layouts}
        for chunk, found in zip(plan.chunks, written, strict=True):
            checksums[chunk.parameter] += found.checksum
            digests[chunk.parameter][chunk.name] = found.digest
        files.finish(work / _CHECKPOINTS, plan.layouts, checksums, digests)
        _write_record(work, source, dtype, header)
    return Imported(target, len(source.expected), plan.nbytes)


class Written(NamedTuple):
    """A chunk that is on the disk."""

    checksum: int  # part of the parameter's checksum
    size: int  # bytes of the parameter
    digest: str  # the file's digest


def _write_chunks(params: Path, plan: ImportPlan, progress: Callable[[int, int], None]) -> list[Written]:
    """Write every chunk, several at a time."""
    lock, done = threading.Lock(), 0

    def work(number: int) -> Written:
        nonlocal done
        if number + _THREADS < len(plan.chunks):
            _read_ahead(plan.chunks[number + _THREADS])
        written = _write_chunk(params, plan, plan.chunks[number])
        with lock:
            done += written.size
            progress(done, plan.nbytes)
        return written

    for chunk in plan.chunks[:_THREADS]:
        _read_ahead(chunk)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="import") as pool:
        try:
            return [made.result() for made in [pool.submit(work, number) for number in range(len(plan.chunks))]]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_chunk(params: Path, plan: ImportPlan, chunk: Chunk) -> Written:
    """Write one chunk; returns what is to be known of it once it is on the disk."""
    layout = plan.layouts[chunk.parameter]
    checksum, digest = 0, xxhash.xxh3_64()
    with DirectFile(params / files.directory_name(chunk.parameter) / chunk.name) as file:
        for part in chunk.parts:
            assert file.size == part.place, chunk
            each = max(1, _BLOCK * part.piece.stored_shape[0] // max(1, part.source.nbytes))
            for row in range(part.rows.start, part.rows.stop, each):
                block = converted(part.read(row, min(row + each, part.rows.stop)), layout.dtype)
                checksum += layout.checksum(block, part.piece.index, row)
                digest.update(block.view("uint8") if block.ndim else block.tobytes())
                file.append(block)
        size = file.size
        rest = bytes(files.chunk_bytes(layout) - size)  # the last of an axis may be shorter
        digest.update(rest)
        file.append(rest)
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


def _check_same(target: Path, header: Mapping[str, Any]) -> None:
    """Refuse a directory that was not made from the same files in the same way (ConversionError)."""
    try:
        record = read_json(target / RECORD)
        made_from, source = record["made_from"], str(record["source"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConversionError(f"{target / RECORD}: cannot be read ({error})"[:400]) from None
    if made_from != _digest(header):
        raise taken(target, WHAT, f" (made from {source:.200} as it was, or with other options)")


def _digest(header: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(header, sort_keys=True).encode())


def _write_record(work: Path, source: HuggingFaceDirectory, dtype: str | None, header: Mapping[str, Any]) -> None:
    """Write the decoder's config, the model's other files, and what an export needs to know besides."""
    (work / "config.txt").write_text(to_text(source.decoder))
    original = work / ORIGINAL
    original.mkdir()
    for file in source.kept_files():
        shutil.copyfile(file, original / file.name)
    kinds = [source.tensors[name].dtype for name in source.expected]
    usual = max(sorted(set(kinds)), key=kinds.count)
    others = {name: source.tensors[name].dtype for name in source.expected if source.tensors[name].dtype != usual}
    record = {
        "architecture": source.architecture.name,
        "source": str(source.path),
        "made_from": _digest(header),
        "dtype": dtype,
        "tensor_dtype": usual,
        "other_dtypes": others,
    }
    (work / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    files.sync([work / "config.txt", work / RECORD, original, *original.iterdir(), work])
