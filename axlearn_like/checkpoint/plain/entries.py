"""Stacks of parameters as their entries, for models that take layers one by one: no whole stack is made."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


class EntriesStruct(jax.ShapeDtypeStruct):
    """Description of a stack that may be given as `StackEntries`; a reader that cannot gives the whole array."""

    @property
    def of_an_entry(self) -> Any:
        """The sharding of an entry."""
        if not isinstance(self.sharding, NamedSharding):
            return self.sharding
        return NamedSharding(self.sharding.mesh, PartitionSpec(*self.sharding.spec[1:]))


class StackEntries:
    """The entries of a stack, along its first axis, as arrays of their own; has the shape and dtype of the stack."""

    def __init__(self, arrays: Sequence[jax.Array]):
        self._arrays = tuple(arrays)
        self.shape: tuple[int, ...] = (len(self._arrays), *self._arrays[0].shape)
        self.dtype: Any = self._arrays[0].dtype

    def __getitem__(self, index: int) -> jax.Array:
        """Return one entry."""
        return self._arrays[index]

    def __iter__(self) -> Iterator[jax.Array]:
        """Yield the entries in order."""
        return iter(self._arrays)

    def astype(self, dtype: Any) -> "StackEntries":
        """Return the entries in another dtype."""
        return self if dtype == self.dtype else StackEntries([array.astype(dtype) for array in self._arrays])


def as_stacks(described: Any) -> Any:
    """Return descriptions without `EntriesStruct`."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, EntriesStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(whole, described)
