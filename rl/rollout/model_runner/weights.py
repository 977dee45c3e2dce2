"""Weights on the engine's devices, in the layout and types that it computes with."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.checkpoint.plain.plain_arrays import EntriesStruct
from axlearn_like.config import ConfigBase, ConfigError, path_of
from axlearn_like.input.source import Source
from axlearn_like.layers.attention.grouped_query import MERGEABLE
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.layers.wrappers.base import plain_config, plain_params
from axlearn_like.layers.wrappers.low_rank.factorised import (
    CalibrationRows,
    FactorisedWeights,
    factorised_config,
    factorised_params,
)
from axlearn_like.layers.wrappers.quantised import StoredWeights, stored_config, stored_params
from mesh import UserError, to_named_sharding
from rl.rollout.config import EngineConfig
from rl.rollout.model_runner.expert_slots import ExpertSlots

Stored = StoredWeights.Config | FactorisedWeights.Config | None


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Weights on the engine's devices, in the engine's layout."""

    params: Params
    approximations: tuple[str, ...] = ()  # tags of rollouts drawn with them, if they are not the trainer's to the bit
    # Key of the version, by which all processes of an engine know their parts; None: the engine is one process
    key: int | None = None


class WeightLayout:
    """The layout of a model's parameters on a mesh.

    Matrices are stored in the type that the model computes in, as fewer bits (`StoredWeights`) or as factors
    (`FactorisedWeights`); what layers compute with unrounded (`Layer.unrounded`: norms, routers, a head of float32
    factors) keeps the trainer's type. Wrapped layers (LoRA) are unwrapped once for each version. Kernels take the
    layers as a stack; XLA takes them one by one.

    Attributes:
        slots: replicas of experts; None: each is on its device alone.
    """

    def __init__(
        self,
        model: ConfigBase,
        mesh: Mesh,
        *,
        stacked: bool,
        stored: Stored = None,
        replicas: ExpertSlots.Config | None = None,
        longest: int = 0,
    ):
        """Describe the layout.

        Args:
            stacked: layers are a stack, for kernels.
            stored: the form in which blocks hold their matrices.
            replicas: room for replicas of experts; None: there are none.
            longest: tokens of a row of calibration that are used.
        """
        self._mesh, self._stacked = mesh, stacked
        with jax.set_mesh(mesh):
            self.model = build_abstract(model)
            graphdef, arriving = split(self.model)
            self._arriving = to_named_sharding(arriving, mesh)
            self._unrounded = frozenset(self.model.unrounded_paths())
            held = _held(model, stored)
            with _named_as_set(stored):
                self.held = self.model if held == model else build_abstract(held)
            self._convert: Callable[[Params], Params] | None = None
            if isinstance(stored, FactorisedWeights.Config):
                plain = build_abstract(plain_config(model, engine=True))
                factors = jax.jit(partial(_factorised, graphdef, plain, self.held))
                rows = cache(partial(_calibration, stored, self.model, longest))  # read with the first weights
                self._convert = lambda params: factors(rows(), params)
            elif held != model:
                self._convert = jax.jit(partial(_converted, graphdef, self.held))
            model_held = build_abstract(held, None if stacked else _unstacked)
            self.graphdef, placed = split(model_held)
            self._placed = to_named_sharding(placed, mesh)
            self._unrounded_here = frozenset(model_held.unrounded_paths())
            self._computed, self.slots = self._placed, None
            if replicas is not None:
                self.slots = replicas.build(layout=self.held.routing_layout, mesh=mesh)
                in_slots = build_abstract(self.slots.held(held), None if stacked else _unstacked)
                self.graphdef, computed = split(in_slots)
                self._computed = to_named_sharding(computed, mesh)
                self._unrounded_here |= frozenset(in_slots.unrounded_paths())

    @property
    def like(self) -> Params:
        """Arrays that can be placed with the least copying: the trainer's layout, the types that are stored here."""
        stacks = {segment.name for segment in self.model.segments}

        def described(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            dtype = leaf.dtype
            if self._convert is None and path_name(path) not in self._unrounded:
                dtype = self.model.dtype
            apart = self._convert is None and not self._stacked and path[0].key in stacks
            kind = EntriesStruct if apart else jax.ShapeDtypeStruct
            return kind(leaf.shape, dtype, sharding=leaf.sharding)

        return jax.tree_util.tree_map_with_path(described, self._arriving)

    @property
    def described(self) -> Params:
        """Shapes, types and shardings of the stored arrays."""
        return jax.tree_util.tree_map_with_path(self._stored, self._computed)

    def place(self, params: Params) -> Params:
        """Return the trainer's parameters in this layout (UserError: an array is missing, or has another shape)."""
        self._check(params)
        with jax.set_mesh(self._mesh):
            if self._convert is None:
                params = jax.tree.map(_on_devices, params, self._arriving)
            else:
                params = self._convert(jax.tree.map(lambda leaf, like: place(leaf, like, like), params, self._arriving))
            if not self._stacked:
                params = self.model.unstack_params(params)
            placed = jax.tree_util.tree_map_with_path(
                lambda path, leaf, like: place(leaf, like, self._stored(path, like)), params, self._placed
            )
            return placed if self.slots is None else self.slots.spread(placed)

    def _check(self, params: Params) -> None:
        wanted = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(self._arriving)}
        given = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        for name in sorted(wanted.keys() ^ given.keys()):
            raise UserError(f"weights: {name} is {'missing' if name in wanted else 'not part of the model'}")
        for name, leaf in wanted.items():
            if given[name].shape != leaf.shape:
                raise UserError(f"weights: {name} has shape {given[name].shape}; the model's is {leaf.shape}")

    def _stored(self, path: Any, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the stored form of a parameter: its type, and for kernels its shape with head axes merged."""
        name, shape, sharding = _name(path), like.shape, like.sharding
        # [layers, d, *heads]; of a `QArray` numbers and scales, of factors [layers, d, rank] and [layers, rank, *heads]
        of_matrix = name.removesuffix(".qvalue").removesuffix(".scale").removesuffix(".a").removesuffix(".b")
        if self._stacked and of_matrix.endswith(MERGEABLE):
            shape = (*shape[:2], math.prod(shape[2:]))
            sharding = NamedSharding(self._mesh, PartitionSpec(*sharding.spec[:3]))
        dtype = like.dtype if path_name(path) in self._unrounded_here else self.model.dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def types_read(cfg: EngineConfig[Any]) -> Callable[[str, np.dtype], np.dtype]:
    """Return the types in which engines read weights: from a parameter's path ("a/b/c") and type in the trainer."""
    if _held(cfg.model, cfg.weights) != cfg.model:  # engines convert what the trainer has
        return lambda path, dtype: dtype
    model = build_abstract(cfg.model)
    model_dtype, unrounded = np.dtype(model.dtype), frozenset(model.unrounded_paths())
    return lambda path, dtype: dtype if path in unrounded else model_dtype


def _held(model: ConfigBase, stored: Stored) -> ConfigBase:
    """Return the model as an engine holds it: without wrappers that it can do without, and in the form of `stored`."""
    plain = plain_config(model, engine=True)
    if isinstance(stored, FactorisedWeights.Config):
        return factorised_config(plain, stored)
    return plain if stored is None else stored_config(plain, stored)


@contextlib.contextmanager
def _named_as_set(stored: Stored) -> Generator[None]:
    """Refusals of what blocks hold name the field that was set, in `stored`, and not where its copies are built."""
    try:
        yield
    except ConfigError as error:
        *_, layer, field = ("", *error.path.split("."))
        if not isinstance(stored, FactorisedWeights.Config) or layer not in stored.layers or not hasattr(stored, field):
            raise
        path = f"{path_of(stored)}.{field}"
        raise ConfigError(str(error).replace(error.path, path, 1), path) from error


def _unstacked(model: Any) -> Any:
    return model.unstack()


def _converted(graphdef: nnx.GraphDef[Any], held: Any, params: Params) -> Params:
    return stored_params(held, plain_params(graphdef, params, engine=True))


def _factorised(
    graphdef: nnx.GraphDef[Any], plain: Any, held: Any, rows: CalibrationRows | None, params: Params
) -> Params:
    return factorised_params(plain, held, plain_params(graphdef, params, engine=True), rows)


def _calibration(stored: FactorisedWeights.Config, model: Any, longest: int) -> CalibrationRows | None:
    """Return the rows of calibration, cut to `longest` tokens; None: no source (UserError: no rows, or bad tokens)."""
    if stored.calibration is None:
        return None
    source: Source = stored.calibration.build()
    rows = [np.asarray(source[index]["tokens"], np.int32)[:longest] for index in range(len(source))]
    stored.require("calibration", bool(rows), "a source of one row of tokens or more")
    size = max(len(row) for row in rows)
    tokens, live = np.zeros((len(rows), size), np.int32), np.zeros((len(rows), size), bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)], live[index, : len(row)] = row, True
    known = tokens.min() >= 0 and tokens.max() < model.vocab_size
    stored.require("calibration", bool(known), f"tokens below the model's vocab_size={model.vocab_size}")
    return CalibrationRows(tokens, live)


def _on_devices(leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
    """Return an array of other devices or sharding as the model has it; one of the host is cut there."""
    return jax.device_put(leaf, like.sharding) if isinstance(leaf, jax.Array) else leaf


def place(leaf: Any, like: jax.ShapeDtypeStruct, stored: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array on the devices, sharded as `like`, then in the shape of `stored`."""
    # Not by way of the default device, which could not hold a large model's stack of matrices.
    placed = jax.device_put(leaf.astype(stored.dtype), like.sharding)
    return placed if placed.shape == stored.shape else jnp.reshape(placed, stored.shape, out_sharding=stored.sharding)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
