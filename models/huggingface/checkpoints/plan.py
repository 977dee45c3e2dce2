"""Plan of an import: which rows of which tensors go into which chunk of which parameter."""

import os
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint.plain.chunks import CHUNK_BYTES, Layout
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.convert import abstract_params, by_name, unrounded_parameters
from models.huggingface.rows import Piece
from models.huggingface.tensor_files.packed import TensorSource, read_piece


class PieceRows(NamedTuple):
    """Rows of one tensor's piece, in the order in which they are stored, and where they begin in the chunk."""

    source: TensorSource
    piece: Piece
    rows: range
    place: int

    def read(self, first: int, last: int) -> np.ndarray:
        """Return some of the rows, with the axes in the order in which they are stored."""
        return read_piece(self.source, self.piece, first, last)


class Chunk(NamedTuple):
    """One file to be written: the parameter, its name among the parameter's chunks, and its parts."""

    parameter: str
    name: str
    parts: list[PieceRows]


class ImportPlan(NamedTuple):
    """Layout of each parameter, by the name that manifests use, and all chunks in the order of the source files."""

    layouts: dict[str, Layout]
    chunks: list[Chunk]

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return sum(layout.nbytes for layout in self.layouts.values())


def plan_import(source: HuggingFaceDirectory, dtype: str | None = None, chunk_bytes: int = CHUNK_BYTES) -> ImportPlan:
    """Return the plan for the whole model.

    `dtype`: of all parameters, but that bfloat16 is not that of what layers compute with unrounded
    (`Layer.unrounded`); None: the one that holds the tensors exactly.
    """
    unrounded = unrounded_parameters(source.decoder)
    shapes = {name: leaf.shape for name, leaf in by_name(abstract_params(source.decoder)).items()}
    dtypes = source.dtypes()
    layouts: dict[str, Layout] = {}
    chunks: dict[tuple[str, str], Chunk] = {}
    for name, tensor in source.expected.items():
        for piece in tensor.pieces:
            key = manifest_name(piece.parameter)
            if key not in layouts:
                kind = dtypes[piece.parameter]
                if dtype == "float32" or (dtype is not None and piece.parameter not in unrounded):
                    kind = dtype  # float32 rounds nothing
                shape, stacked = shapes[piece.parameter], len(piece.index)
                layouts[key] = Layout.of(shape, kind, stacked, piece.stored_axes, chunk_bytes)
            _add(chunks, key, layouts[key], source.tensors[name], piece)
    layouts = {name: layouts[name] for name in map(manifest_name, shapes)}  # order of the parameters
    return ImportPlan(layouts, sorted(chunks.values(), key=_place))


def manifest_name(parameter: str) -> str:
    """Return a parameter's name as manifests have it."""
    return parameter.replace(".", "/")


def _add(chunks: dict[tuple[str, str], Chunk], key: str, layout: Layout, stored: TensorSource, piece: Piece) -> None:
    """Add the rows of a piece to the chunks that they are in."""
    count = piece.stored_shape[0]
    for first in range(0, count, layout.rows):
        rows = range(first, min(first + layout.rows, count))
        name, place = layout.position(piece.index, first)
        chunk = chunks.setdefault((key, name), Chunk(key, name, []))
        chunk.parts.append(PieceRows(stored, piece, rows, place))


def _place(chunk: Chunk) -> tuple[str, int]:
    first = chunk.parts[0]
    return os.fspath(first.source.path), first.source.start + first.rows.start


def converted(block: np.ndarray, dtype: str) -> np.ndarray:
    """Return a contiguous block in that dtype; without a copy where it is so already."""
    return np.ascontiguousarray(block, dtype=jnp.dtype(dtype))


def identity(source: HuggingFaceDirectory) -> Mapping[str, list[int]]:
    """Return name -> size and time of change of each file of a model: what tells a source from another."""
    files = {part.path for tensor in source.tensors.values() for part in tensor.stored(0, 1)} | set(source.kept_files())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)}
