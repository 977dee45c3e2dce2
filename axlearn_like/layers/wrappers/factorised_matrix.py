"""Objects in the place of a parameter that `project` treats apart: a matrix as two factors, and one that is watched."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorisedMatrix:
    """The product a b in the place of a matrix; `project` multiplies with a, then with b.

    Attributes:
        a: [*in, rank].
        b: [rank, *out].
    """

    a: jax.Array
    b: jax.Array

    def __getitem__(self, index: Any) -> Self:
        """Return the whole, as a parameter is read by `[...]`."""
        assert index is ..., "a matrix of two factors is read as a whole"
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix: [*in, *out]."""
        return (*self.a.shape[:-1], *self.b.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return len(self.shape)

    @property
    def rank(self) -> int:
        """The inner size of the product."""
        return self.a.shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """A matrix that tells what it is multiplied with.

    Attributes:
        weight: the matrix.
        see: called with the activations [batch, length, *in] of each product, while it is traced.
    """

    weight: jax.Array
    see: Callable[[jax.Array], None] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index: Any) -> Self:
        """Return the whole, as a parameter is read by `[...]`."""
        assert index is ..., "a watched matrix is read as a whole"
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape
