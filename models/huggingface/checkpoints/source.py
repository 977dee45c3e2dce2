"""Parameters read from Hugging Face's files straight onto the devices of a run."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint.manifest import check_structure
from axlearn_like.checkpoint.plain.plain_arrays import EntriesStruct, StackEntries, put_copies
from axlearn_like.checkpoint.reader import check_params, restore_params, saved_manifest
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.parameter_names import path_name
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.plan import manifest_name
from models.huggingface.convert import abstract_params, by_name
from models.huggingface.rows import Piece
from models.huggingface.tensor_files.packed import TensorSource, read_piece
from models.huggingface.tensor_files.safetensors import Stored

Sources = list[tuple[Piece, TensorSource]]  # pieces of one parameter, or of one of its entries
_FLOATS = ("float32", "bfloat16")
_THREADS = 2  # arrays that are made at a time
_ROWS = 64  # rows transposed at a time, to fit L1


class HuggingFaceReader(Configurable):
    """Reader of a directory for `StartFrom`: each process reads the parts of tensors that its devices need."""

    class Config(ConfigBase["HuggingFaceReader"]):
        pass

    def __init__(self, cfg: Config, *, path: str):
        self._path = path

    def check(self, abstract_params: Any) -> None:
        """Refuse files of another model by their headers; no tensor is read (UserError)."""
        self._check(HuggingFaceDirectory.open(self._path), abstract_params)

    def params(self, abstract_params: Any) -> Any:
        """Return the parameters in the shapes, dtypes and shardings of `abstract_params`.

        Raises:
            UserError: the files are missing, damaged, or of another model; names file and tensor.
        """
        directory = HuggingFaceDirectory.open(self._path)
        self._check(directory, abstract_params)
        directory.check_copies()
        sources: dict[str, Sources] = {}
        for name, tensor in directory.expected.items():
            for piece in tensor.pieces:
                sources.setdefault(piece.parameter, []).append((piece, directory.tensors[name]))
        arrays = _read(by_name(abstract_params), sources)
        names = jax.tree_util.tree_map_with_path(
            lambda path, _: jax.tree_util.keystr(path, simple=True, separator="."), abstract_params
        )
        return jax.tree.map(lambda name: arrays[name], names)

    def _check(self, directory: HuggingFaceDirectory, wanted: Any) -> None:
        described = by_name(abstract_params(directory.decoder))
        dtypes = {name: str(leaf.dtype) for name, leaf in by_name(wanted).items()}
        manifest = {
            manifest_name(name): {"shape": list(leaf.shape), "dtype": dtypes.get(name, "float32")}
            for name, leaf in described.items()
        }
        try:
            check_structure(f"{Path(self._path)}", wanted, manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{error} ({directory.architecture.name})") from None


class ImportedReader(Configurable):
    """Reader, for `StartFrom`, of what an import wrote: what it kept in bfloat16 may become float32, and vice versa."""

    class Config(ConfigBase["ImportedReader"]):
        pass

    def __init__(self, cfg: Config, *, path: str):
        self._path = path

    def check(self, abstract_params: Any) -> None:
        """Refuse parameters of another model by the manifest (CheckpointError)."""
        check_params(self._path, self._saved(abstract_params))

    def params(self, abstract_params: Any) -> Any:
        """Return the parameters in the shapes, dtypes and shardings of `abstract_params` (CheckpointError)."""
        leaves, tree = jax.tree.flatten(restore_params(self._path, self._saved(abstract_params)))
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(abstract_params)]
        # Each is freed as soon as it is cast, so that memory never holds two copies of all.
        return jax.tree.unflatten(tree, [leaves.pop(0).astype(dtype) for dtype in dtypes])

    def _saved(self, wanted: Any) -> Any:
        """Return `wanted` with the dtypes in which the arrays are saved, of those that an import writes."""
        manifest = saved_manifest(self._path)

        def leaf(keys: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            saved = manifest.get(path_name(keys), {}).get("dtype")
            dtype = jnp.dtype(saved) if str(x.dtype) in _FLOATS and saved in _FLOATS else x.dtype
            kind = EntriesStruct if isinstance(x, EntriesStruct) else jax.ShapeDtypeStruct
            return kind(x.shape, dtype, sharding=x.sharding)

        return jax.tree_util.tree_map_with_path(leaf, wanted)


class _Job(NamedTuple):
    """An array to be made: a parameter, or an entry of a stack."""

    place: tuple[str, int]  # the place of its first tensor
    name: str  # the parameter's name
    index: int | None  # the entry's index; None: the whole parameter
    make: Callable[[], jax.Array]  # reads it


def _read(wanted: Mapping[str, Any], sources: Mapping[str, Sources]) -> dict[str, Any]:
    """Return all parameters; the files are read from front to back, two entries at a time, of whole stacks one."""
    jobs = [job for name, leaf in wanted.items() for job in _jobs(name, leaf, sources[name])]
    jobs.sort(key=lambda job: job.place)
    alone = threading.Lock()  # stacks are large, and in host memory

    def make(job: _Job) -> jax.Array:
        with alone if job.index is None else contextlib.nullcontext():
            return job.make()

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="read") as threads:
        arrays = {(job.name, job.index): array for job, array in zip(jobs, threads.map(make, jobs), strict=True)}
    stacks = {
        name: StackEntries([arrays[name, index] for index in range(leaf.shape[0])])
        for name, leaf in wanted.items()
        if (name, None) not in arrays
    }
    return {name: stacks[name] if name in stacks else arrays[name, None] for name in wanted}


def _jobs(name: str, leaf: Any, sources: Sources) -> Iterator[_Job]:
    """Yield the arrays of a parameter: one for each entry if entries are wanted, on one device."""
    by_entry: dict[int | None, Sources] = {}
    separate = isinstance(leaf, EntriesStruct) and _on_one_device(leaf)
    for piece, stored in sources:
        by_entry.setdefault(piece.index[0] if separate else None, []).append((piece, stored))
    for index, own in by_entry.items():
        place = min((str(stored.path), stored.start) for _, stored in own)
        make = partial(_array, leaf, own) if index is None else partial(_entry, leaf, index, own)
        yield _Job(place, name, index, make)


def _array(leaf: Any, sources: Sources) -> jax.Array:
    """Return one parameter; host memory is taken for one device's part of it at a time."""
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    if _on_one_device(leaf) and _plain(sources, 0):
        return _put(sources[0], dtype, leaf.sharding)
    part = partial(_part, shape, dtype, sources)
    if leaf.sharding is None:
        return jax.device_put(part(None))
    return jax.make_array_from_callback(shape, leaf.sharding, part)


def _entry(leaf: EntriesStruct, index: int, sources: Sources) -> jax.Array:
    """Return one entry of a stack."""
    if _plain(sources, 1):
        return _put(sources[0], np.dtype(leaf.dtype), leaf.of_an_entry)
    where = (slice(index, index + 1), *[slice(None)] * (len(leaf.shape) - 1))
    part = _part(tuple(leaf.shape), np.dtype(leaf.dtype), sources, where)
    return jax.device_put(part[0], leaf.of_an_entry)


def _put(source: tuple[Piece, TensorSource], dtype: np.dtype[Any], sharding: Any) -> jax.Array:
    """Return an array that is a whole piece of a tensor; the device copies it out of the file, and transposes it."""
    piece, stored = source
    found = read_piece(stored, piece, 0, piece.stored_shape[0]).transpose(piece.order)
    # Blocks, so that no more than the arrays under way are mapped.
    (array,) = put_copies([found.astype(dtype, copy=False)], sharding)
    return array


def _plain(sources: Sources, stacked: int) -> bool:
    """Return True if one piece of a tensor that is not packed is all of an array below so many axes of stacks."""
    return len(sources) == 1 and len(sources[0][0].index) == stacked and isinstance(sources[0][1], Stored)


def _on_one_device(leaf: Any) -> bool:
    sharding = leaf.sharding
    return sharding is None or (len(sharding.device_set) == 1 and sharding.is_fully_addressable)


def _part(
    shape: tuple[int, ...], dtype: np.dtype[Any], sources: Sources, where: tuple[slice, ...] | None
) -> np.ndarray:
    """Return a part of a parameter, in host memory."""
    spans = [s.indices(n)[:2] for s, n in zip(where or (), shape, strict=False)] or [(0, n) for n in shape]
    out: np.ndarray = np.empty([stop - start for start, stop in spans], dtype)
    for piece, stored in sources:
        stack = spans[: len(piece.index)]
        if all(start <= i < stop for i, (start, stop) in zip(piece.index, stack, strict=True)):
            local = tuple(i - start for i, (start, _) in zip(piece.index, stack, strict=True))
            inner = [slice(*span) for span in spans[len(stack) :]]
            axes = piece.stored_axes
            _copy(out[local].transpose(axes), stored, piece, [inner[axis] for axis in axes])
    return out


def _copy(out: np.ndarray, source: TensorSource, piece: Piece, where: list[slice]) -> None:
    """Copy and cast a part of a piece into a view with other strides."""
    rows, *others = where
    for row in range(rows.start, rows.stop, _ROWS):
        end = min(row + _ROWS, rows.stop)
        block = read_piece(source, piece, row, end)[(slice(None), *others)]
        to = out[row - rows.start : end - rows.start]
        if block.dtype == to.dtype:  # numpy copies plain numbers faster than bfloat16
            bits = f"uint{8 * to.dtype.itemsize}"
            block, to = block.view(bits), to.view(bits)
        to[...] = block
