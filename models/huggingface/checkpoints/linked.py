"""Linked import: the tensors stay in their files, of which the directory has second names (hard links).

Nothing is written but digests, so that an import takes as long as one reading of the files. Later readers of any part
compare what they read: the files may be deleted or replaced under their first names, but not changed in place.
"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint.manifest import Manifest
from axlearn_like.checkpoint.plain.chunks import sync
from axlearn_like.config import to_text
from models.huggingface.checkpoints.directory import LINKED, ORIGINAL, RECORD, HuggingFaceDirectory
from models.huggingface.checkpoints.importing import WHAT, Imported, check_same, write_record
from models.huggingface.checkpoints.plan import identity, manifest_name
from models.huggingface.checkpoints.work_directory import check_free, import_directory
from models.huggingface.convert import abstract_params, by_name
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files.file_digests import FileDigests
from models.huggingface.tensor_files.found import INDEX
from models.huggingface.tensor_files.packed import read_piece


def link_checkpoint(
    source: HuggingFaceDirectory, target: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Imported:
    """Write `target`: `config.txt` of the decoder, the model's files with tensors linked, and digests of these.

    Args:
        source: checked.
        target: a directory that does not exist, is empty, or is of the same import, on the file system of the source.
        progress: callback with the bytes read and all bytes.

    Raises:
        UserError: the target exists, another import of it is under way, or the files cannot be linked. Nothing stays
            behind.
    """
    target = target.expanduser().absolute()
    filled = check_free(target, WHAT, content=RECORD)
    source.check_copies()
    parts = {part.path: part for tensor in source.tensors.values() for part in tensor.stored(0, 1)}
    files = sorted(parts)
    total = sum(path.stat().st_size for path in files)
    header = {"link": identity(source), "decoder": to_text(source.decoder)}
    if filled:
        check_same(target, header)
        return Imported(target, len(source.expected), total, 0, before=True)
    done, lock = 0, threading.Lock()

    def read(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    written = sum(file.stat().st_size for file in source.kept_files())
    with import_directory(target, header, written, lambda work: None) as (work, _):
        write_record(work, source, None, header)
        original = work / ORIGINAL
        for path in files:
            _link(path, original / path.name, target)
        if len(files) > 1:  # several files have an index
            shutil.copyfile(source.path / INDEX, original / INDEX)
        found = {path.name: FileDigests.of(original / path.name, read) for path in files}
        for path in files:
            before = parts[path].digests  # digests of a linked import
            if before is not None and before.digests != found[path.name].digests:
                before.check(0, before.size)
        recorded = {name: {"size": one.size, "block": one.block, "digests": one.digests} for name, one in found.items()}
        (work / LINKED).write_text(json.dumps(recorded) + "\n")
        sync([*original.iterdir(), original, work / LINKED, work])
    return Imported(target, len(source.expected), total, 0)


def _link(path: Path, second: Path, target: Path) -> None:
    """Give a file a second name; of a symbolic link, as caches of the Hub have them, the file that it names."""
    try:
        os.link(path.resolve(), second)
    except OSError as error:
        why = f"no hard link to it can be made there ({error.strerror})"
        if error.errno == errno.EXDEV:
            why = "it is on another file system, where hard links do not reach; name a target on its own"
        raise ConversionError(f"{target}: {path}: {why}, or import it without --link, which copies") from None


class LinkedParams:
    """The parameters of a directory in Hugging Face's form, entry by entry, as `SavedParams` has a checkpoint's."""

    def __init__(self, source: HuggingFaceDirectory):
        """`source`: a linked import, so that what is read is compared."""
        self.path, dtypes = source.path, source.dtypes()
        shapes = {name: leaf.shape for name, leaf in by_name(abstract_params(source.decoder)).items()}
        self.manifest: Manifest = {
            manifest_name(name): {"shape": list(shape), "dtype": dtypes[name]} for name, shape in shapes.items()
        }
        self._pieces = {
            (manifest_name(piece.parameter), piece.index): (source.tensors[name], piece)
            for name, tensor in source.expected.items()
            for piece in tensor.pieces
        }

    def entry(self, name: str, index: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
        """Return one entry of a stack, its axes in this order, contiguous (ConversionError)."""
        source, piece = self._pieces[name, index]
        block = read_piece(source, piece, 0, piece.stored_shape[0])
        axes = [piece.stored_axes.index(axis) for axis in order]
        return np.ascontiguousarray(block.transpose(axes), jnp.dtype(self.manifest[name]["dtype"]))
