"""The table of a family: which tensor of Hugging Face's form is which parameter of ours, as a layout of axes.

In Hugging Face's form a matrix is stored [out, in] or [in, out], each layer and each expert has tensors of its own,
heads are flattened into one axis, and one tensor may hold several parameters. Ours is [*in, *out] with the heads as
axes; layers, and in these experts, are stacked on the first axes. The name of a parameter ends in the letters of its
axes (`q_dkqh`), so a row only says where these letters are in the tensor: `kqh,d` is a matrix of k * q * h rows and d
columns.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from axlearn_like.layers.parameter_names import shape_suffix
from mesh.errors import UserError, did_you_mean


class ConversionError(UserError):
    """Tensors and config do not belong together; the message names the tensors."""


class Row(NamedTuple):
    """One parameter."""

    # The tensor's name; `{}` is the number of the layer (in a section of layers), a further one the index of the first
    # axis of a layer's parameter, such as the expert
    name: str
    # Letters of the tensor's axes, divided by commas: `kqh,d`. Square brackets are around what lies in a row with other
    # parameters in the same tensor: `[kqh],d` for queries above keys and values, `k[h],r` for the keys and values of
    # each head in turn, `e,d,f[]` for numbers that alternate.
    axes: str
    part: int = 0  # number of the parameter among those in the brackets
    shared: bool = False  # True if the whole tensor is this parameter and also others, which are equal


class Section(NamedTuple):
    """Rows of the parameters under one path."""

    prefix: str  # the first part of our paths, such as "layers."; "" for the root
    rows: Mapping[str, Row]  # path below the prefix -> row
    # Numbers, in tensor names, of the layers that are stacked on our first axis; None: no stack
    layers: tuple[int, ...] | None = None

    def transposed(self, axes: Mapping[str, str]) -> "Section":
        """Return the section with the tensors' axes of some rows in another order; `axes`: old -> new."""
        rows = {path: row._replace(axes=axes.get(row.axes, row.axes)) for path, row in self.rows.items()}
        return self._replace(rows=rows)


class Piece(NamedTuple):
    """Part of one tensor that is one of our parameters, or one entry of a stacked one."""

    parameter: str  # path of the parameter
    index: tuple[int, ...]  # the entry's index in the stack
    split: tuple[int, ...]  # the tensor's shape with merged axes separate
    run: tuple[int, int, int] | None  # axis of `split`, and the piece's range on it; None: all
    stored_shape: tuple[int, ...]  # the piece's shape in the tensor's order of axes, with those of the run separate too
    order: tuple[int, ...]  # transposition of `stored_shape` to our order of axes

    def spanned(self, length: int, first: int, last: int) -> tuple[int, int]:
        """Return the range of a tensor's `length` rows that holds these indices of the piece's first stored axis."""
        unit = length // self.split[0]
        if self.run is None or self.run[0]:
            return first * unit, last * unit
        start, stop = self.run[1:]
        each = (stop - start) // self.stored_shape[0]
        return (start + first * each) * unit, (start + last * each) * unit

    def of_rows(self, rows: np.ndarray, first: int, last: int) -> np.ndarray:
        """Return these indices of the first stored axis, as in `stored`, from the rows that `spanned` names."""
        if self.run is None or self.run[0]:
            rows = rows.reshape(last - first, *self.split[1:])
            if self.run is not None:
                axis, start, stop = self.run
                rows = rows[(slice(None),) * axis + (slice(start, stop),)]
        return rows.reshape(last - first, *self.stored_shape[1:])

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Return the piece with our order of axes: a view of the tensor, to read its entries or to set them."""
        return self.stored(tensor).transpose(self.order)

    def stored(self, tensor: np.ndarray) -> np.ndarray:
        """Return the piece with the tensor's order of axes: a view of the tensor."""
        x = tensor.reshape(self.split)
        if self.run is not None:
            axis, start, stop = self.run
            x = x[(slice(None),) * axis + (slice(start, stop),)].reshape(self.stored_shape)
        return x

    @property
    def stored_axes(self) -> tuple[int, ...]:
        """Axes of the parameter's entry, in the tensor's order."""
        return tuple(self.order.index(axis) for axis in range(len(self.order)))


class Tensor(NamedTuple):
    """A tensor in Hugging Face's form: its shape, and the pieces that fill it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def tensors_of(abstract: Any, sections: Sequence[Section], family: str) -> dict[str, Tensor]:
    """Return the tensors of all parameters: name -> shape and pieces, in the order of the sections' rows.

    Args:
        abstract: nested dict of arrays or `jax.ShapeDtypeStruct`s.
        sections: the architecture's tables.
        family: name of the architecture, for errors.

    Raises:
        ConversionError: a parameter has no row; it is named.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    }
    parts: dict[str, list[tuple[int, _Slot]]] = {}
    for section in sections:
        for path, row in section.rows.items():
            shape = leaves.pop(section.prefix + path, None)
            if shape is not None:
                for name, slot in _slots(section, row, section.prefix + path, tuple(shape)):
                    parts.setdefault(name, []).append((row.part, slot))
    for name in leaves:
        known = [section.prefix + path for section in sections for path in section.rows]
        raise ConversionError(f"parameter {name} has no counterpart in {family}{did_you_mean(name, known)}")
    return {name: _tensor(name, [slot for _, slot in sorted(group)]) for name, group in parts.items()}


def count_tensors(shapes: Mapping[str, tuple[int, ...]], sections: Sequence[Section]) -> int:
    """Return how many names `tensors_of` lists, those of tensors with several parameters once for each."""
    rows = [(section.prefix + path, row.name.count("{}")) for section in sections for path, row in section.rows.items()]
    return sum(math.prod(shapes[path][:stacked]) for path, stacked in rows if path in shapes)


class _Slot(NamedTuple):
    """One parameter, or an entry of a stack: the tensor's axes, and the size of each letter."""

    parameter: str
    index: tuple[int, ...]
    axes: str
    letters: str
    sizes: tuple[int, ...]
    shared: bool


def _slots(section: Section, row: Row, parameter: str, shape: tuple[int, ...]) -> Iterator[tuple[str, _Slot]]:
    """Yield (tensor's name, slot) for each tensor of a row."""
    stacked = section.layers is not None
    count = row.name.count("{}")
    own = shape[1:] if stacked else shape
    letters = shape_suffix(parameter.rpartition(".")[2], len(own)) or "d"
    if len(letters) != len(own) or (stacked and section.layers and len(section.layers) != shape[0]) or count < stacked:
        raise ConversionError(f"{row.name}: its row does not fit the parameter {parameter} of shape {shape}")
    inner = count - stacked
    for index in np.ndindex(*shape[:count]):
        numbers = ((section.layers[index[0]],) if section.layers is not None else ()) + index[stacked:]
        yield row.name.format(*numbers), _Slot(parameter, index, row.axes, letters[inner:], own[inner:], row.shared)


_AXIS = re.compile(r"(\w*)(?:\[(\w*)\](\w*))?")


def _tensor(name: str, slots: list[_Slot]) -> Tensor:
    runs = [math.prod(_sizes(slot, _inside(slot.axes) or "")) for slot in slots]
    if len(slots) > 1 and any(_inside(slot.axes) is None and not slot.shared for slot in slots):
        raise ConversionError(f"{name}: {' and '.join(slot.parameter for slot in slots)} have the same tensor")
    ends = np.cumsum(runs).tolist()
    pieces = [_piece(slot, end - run, end, ends[-1]) for slot, run, end in zip(slots, runs, ends, strict=True)]
    shapes = {shape for shape, _ in pieces}
    if len(shapes) > 1:
        raise ConversionError(f"{name}: its parts differ in shape, {' and '.join(map(str, shapes))}")
    return Tensor(shapes.pop(), tuple(piece for _, piece in pieces))


def _inside(axes: str) -> str | None:
    found = re.search(r"\[(\w*)\]", axes)
    return None if found is None else found[1]


def _sizes(slot: _Slot, letters: Iterable[str]) -> list[int]:
    return [slot.sizes[slot.letters.index(letter)] for letter in letters]


def _piece(slot: _Slot, start: int, stop: int, whole: int) -> tuple[tuple[int, ...], Piece]:
    """Return the shape of the tensor, and the piece for the run from `start` to `stop`."""
    shape: list[int] = []
    split: list[int] = []
    stored_shape: list[int] = []
    stored, run = "", None
    for axis in slot.axes.split(","):
        found = _AXIS.fullmatch(axis)
        assert found is not None, f"{slot.parameter}: {slot.axes}"
        before, inside, after = found[1], found[2], found[3] or ""
        first, last = _sizes(slot, before), _sizes(slot, after)
        middle = [] if inside is None else [whole]
        if inside is not None:
            run = (len(split) + len(first), start, stop)
        shape.append(math.prod([*first, *middle, *last]))
        split += [*first, *middle, *last]
        stored_shape += [*first, *_sizes(slot, inside or ""), *last]
        stored += before + (inside or "") + after
    assert sorted(stored) == sorted(slot.letters), f"{slot.parameter}: {slot.axes} are not the axes {slot.letters}"
    order = tuple(stored.index(letter) for letter in slot.letters)
    return tuple(shape), Piece(slot.parameter, slot.index, tuple(split), run, tuple(stored_shape), order)
