"""Objects in the place of a parameter that `project` treats apart: a matrix in columns, or in a stack."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mesh.sharding import full_spec


class MatrixForm:
    """A matrix in another form than an array, where a layer expects a parameter."""

    def __getitem__(self, index: Any) -> Self:
        """Return the whole, as a parameter is read by `[...]`; a part of it makes no sense."""
        assert index is ..., f"{type(self).__name__} is read as a whole"
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched(MatrixForm):
    """A matrix that tells what it is multiplied with."""

    weight: jax.Array  # the matrix
    # Function that gets the activations [batch, length, *in] of each product, while it is traced
    see: Callable[[jax.Array], None] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape


@dataclasses.dataclass(frozen=True)
class Transposed(MatrixForm):
    """The transpose of a stored matrix [out, in]: a tied head."""

    stored: Any  # the matrix as it is stored

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the transpose."""
        return self.stored.shape[::-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ColumnParts(MatrixForm):
    """A matrix in the place of a parameter, cut into columns for few rows (wrappers/columns.py)."""

    parts: tuple[jax.Array, ...]  # [in, columns] each, with the input axes merged, and the output axes
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # shape of the parameter

    @property
    def T(self) -> Self:  # noqa: N802
        """The head's matrix of a tied table: its parts are turned already."""
        return dataclasses.replace(self, shape=self.shape[::-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackEntry(MatrixForm):
    """A matrix of a stack, in the place of a parameter: a kernel reads it there, where XLA would copy it out first."""

    stack: Any  # [layers, *in, *out]; or, of experts that an engine holds as int8, a `QArray` of this shape
    index: jax.Array  # int32, its place

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.stack.shape[1:]

    def as_matrix(self, inputs: int) -> Self:
        """Return it as [in, out], sharded as the first of its input and of its output axes are."""
        shape = (self.stack.shape[0], math.prod(self.shape[:inputs]), math.prod(self.shape[inputs:]))
        spec = full_spec(self.stack)
        spec = None if spec is None else PartitionSpec(spec[0], spec[1], spec[1 + inputs])
        return dataclasses.replace(self, stack=jnp.reshape(self.stack, shape, out_sharding=spec))
