"""Adapters on the engine's devices: one array for each factor of each matrix, with a place for every slot."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.config import ConfigBase
from axlearn_like.layers.base import Params, build_abstract
from axlearn_like.layers.wrappers.adapters import Adapter, Factors, Matrix, check_fits, insert, matrices, padded
from axlearn_like.layers.wrappers.base import plain_config
from mesh import UserError


@dataclasses.dataclass(frozen=True)
class AdapterLimits:
    """Room for adapters in an engine."""

    slots: int  # adapters at the same time
    rank: int = 16  # the largest rank; all take as much memory and time as one of this rank
    match: tuple[str, ...] = ("*",)  # the matrices that they may adapt, by path in the model: fewer cost less

    def __post_init__(self) -> None:
        """Refuse limits without room."""
        for name in ("slots", "rank"):
            if getattr(self, name) < 1:
                raise UserError(f"AdapterLimits.{name}: got {getattr(self, name)}; expected 1 or more")


class AdapterBank:
    """The adapters of all slots. Slot 0 is the base model, and stays zero."""

    def __init__(self, limits: AdapterLimits, model: ConfigBase, mesh: Mesh, dtype: Any, *, stacked: bool):
        """Make an empty bank, `stacked` as in `WeightLayout` (UserError: no matrix of the model can be adapted)."""
        self.limits, self.stacked = limits, stacked
        self._mesh, self._dtype = mesh, dtype
        built = build_abstract(plain_config(model))
        self._segments = built.segments
        self.known: Mapping[str, Matrix] = dict(matrices(built, limits.match))
        if not self.known:
            every = ", ".join(path for path, _ in matrices(built)) or "none"
            raise UserError(f"no matrix of the model fits match={limits.match!r}; those that can be adapted: {every}")
        self._held: dict[int, Adapter] = {}
        self.arrays: Params | None = None
        self._put = jax.jit(self._placed, donate_argnums=0)
        self.wake()

    def check(self, adapter: Adapter) -> None:
        """Refuse an adapter that does not fit (UserError)."""
        check_fits(adapter, self.known, self.limits.rank)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot, in the place of another."""
        self._held[slot] = adapter
        if self.arrays is not None:
            self._write(slot, adapter)

    def compile_put(self) -> None:
        """Compile what `put` runs, so that an adapter that comes later finds it: slot 0 is written as it is, zero."""
        self._write(0, Adapter({}))

    def sleep(self) -> None:
        """Give back the memory of the devices."""
        self.arrays = None

    def wake(self) -> None:
        """Take the memory again, and write all adapters into it."""
        if self.arrays is None:
            self.arrays = self._empty()
            for slot, adapter in self._held.items():
                self._write(slot, adapter)

    @property
    def nbytes(self) -> int:
        """Bytes of the bank, on all devices together."""
        each = self._dtype.itemsize * (1 + self.limits.slots) * self.limits.rank
        return each * sum(one.layers * (one.inputs + one.outputs) for one in self.known.values())

    def _empty(self) -> Params:
        tree: Params = {}
        slots, rank = 1 + self.limits.slots, self.limits.rank
        for path, matrix in self.known.items():
            inside, outside = matrix.sharding
            a = self._zeros((matrix.layers, slots, matrix.inputs, rank), inside, None)
            b = self._zeros((matrix.layers, slots, rank, matrix.outputs), None, outside)
            insert(tree, path, Factors(a, b))
        return self._layered(tree)

    def _zeros(self, shape: tuple[int, ...], *last: Any) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(None, None, *last))
        return jnp.zeros(shape, self._dtype, device=sharding)

    def _write(self, slot: int, adapter: Adapter) -> None:
        new = self._layered(padded(adapter, self.known, self.limits.rank))
        with jax.set_mesh(self._mesh):
            self.arrays = self._put(self.arrays, new, slot)

    def _placed(self, arrays: Params, new: Params, slot: Any) -> Params:
        axis = int(self.stacked)

        def written(held: jax.Array, one: jax.Array) -> jax.Array:
            one = jnp.expand_dims(one.astype(held.dtype), axis)
            one = jax.sharding.reshard(one, jax.typeof(held).sharding.spec)
            return jax.lax.dynamic_update_slice_in_dim(held, one, slot, axis)

        return jax.tree.map(written, arrays, new)

    def _layered(self, tree: Params) -> Params:
        """Return nested arrays in the form of the engine's parameters: stacks, or layers one by one."""
        if self.stacked:
            return tree
        layers = {
            segment.first + i: jax.tree.map(lambda leaf, i=i: leaf[i], tree[segment.name])
            for segment in self._segments
            if segment.name in tree
            for i in range(segment.count)
        }
        return {"layers": layers}
