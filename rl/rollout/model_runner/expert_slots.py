"""Replicas of popular experts in an engine: planned with each version, from the routing of what was drawn before.

A plan is in the weights: each mixture holds the matrices of its slots and the table that fills them, so a version
switches both at once, and nothing is compiled for another plan.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, override

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.config import ConfigBase, Configurable, replace
from axlearn_like.layers.base import Params
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.placement import ExpertPlan, make_plan
from axlearn_like.layers.moe.replicas import to_slots
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.layers.moe.slots import slotted

_AXIS = "expert"
_TABLE = ("experts_s", "ends_s")


class _Owner(NamedTuple):
    """The experts of a layer, or of a stack of them."""

    keys: tuple[Any, ...]  # keys of nested parameters
    rows: slice | int  # rows of a plan


class ExpertSlots(Configurable):
    """Counts of tokens by expert, and the plans that follow from them. `plan`: that of the weights in place."""

    class Config(ConfigBase["ExpertSlots"]):
        slots: int = 1  # experts that a device holds beside its part of all, each with its whole memory

        @override
        def check_fields(self) -> None:
            self.require_least(1, "slots")

        def check_policy(self, layout: RoutingLayout | None, mesh: Mesh) -> RoutingLayout:
            """Return the layout of a model's routing (ConfigError: it records none, or there is one device)."""
            recorded = layout is not None and layout.recorded
            self.require(
                "slots",
                recorded,
                "a policy whose mixtures, all of one kind, have record_routing=True (trainer.replay_routing sets it)",
            )
            self.require("slots", mesh.shape[_AXIS] > 1, "an engine.mesh with an axis expert of 2 devices or more")
            assert layout is not None
            return layout

    def __init__(self, cfg: Config, *, layout: RoutingLayout | None, mesh: Mesh):
        self._layout, self._mesh = cfg.check_policy(layout, mesh), mesh
        self._devices = mesh.shape[_AXIS]
        self._each = self._layout.num_experts // self._devices + cfg.slots
        shape = len(self._layout.layers), self._layout.num_experts
        self._drawn, self._before = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.plan = self._next_plan()
        self._spread: Any = jax.jit(self._to_slots, static_argnames="spec")

    @property
    def slots(self) -> int:
        """Slots of all devices together."""
        return self._devices * self._each

    def held(self, model: ConfigBase) -> ConfigBase:
        """Return a copy of a model's config with its experts in slots. UserError: experts of a kind without."""
        model = model.clone()
        replace(model, Experts.Config, partial(slotted, slots=self.slots))
        return model

    def count(self, routing: np.ndarray) -> None:
        """Count the experts of tokens, [tokens, layers with experts, top_k]."""
        layers, experts = self._drawn.shape
        places = routing.astype(np.int64) + np.arange(layers)[:, None] * experts
        self._drawn += np.bincount(places.reshape(-1), minlength=layers * experts).reshape(layers, experts)

    def installed(self, params: Params) -> None:
        """Take the plan of weights that are in place from now on, and begin to count from 0."""
        owners = [(_at(params, owner.keys), owner) for owner in self._owners(params)]
        tables = np.zeros((2, len(self._drawn), self.slots), np.int32)
        for held, owner in owners:
            for table, name in zip(tables, _TABLE, strict=True):
                table[owner.rows] = np.asarray(held[name])
        self.plan = ExpertPlan(tables[0], tables[1], self._devices)
        self._before, self._drawn = self._drawn, np.zeros_like(self._drawn)

    def figures(self) -> dict[str, float]:
        """Return the busiest device's rows over the mean, and the same without replicas; nothing: no token."""
        loads = self._drawn.copy()
        if not loads.any():
            return {}
        home = loads.reshape(len(loads), self._devices, -1).sum(axis=2)
        return {
            "busiest_to_mean": round(self.plan.busiest_to_mean(loads), 4),
            "busiest_to_mean_without": round(float((home.max(axis=1) / home.mean(axis=1)).max()), 4),
            "most_replicas": int(self.plan.replicas(self._layout.num_experts).max()),
        }

    def _next_plan(self) -> ExpertPlan:
        """Return the plan for what this version and the one before have drawn."""
        return make_plan(self._drawn + self._before, self._devices, self._each)

    def spread(self, params: Params) -> Params:
        """Return placed weights with those of experts in the slots of a new plan."""
        plan = self._next_plan()
        for owner in list(self._owners(params)):
            held, tables = dict(_at(params, owner.keys)), (plan.experts[owner.rows], plan.ends[owner.rows])
            for name in Experts.grouped:
                held[name] = self._spread(held[name], tables[0], spec=held[name].sharding.spec)
            everywhere = NamedSharding(self._mesh, PartitionSpec())
            for name, table in zip(_TABLE, tables, strict=True):
                held[name] = jax.device_put(table, everywhere)
            params = _with(params, owner.keys, held)
        return params

    def _to_slots(self, matrices: jax.Array, experts: jax.Array, *, spec: PartitionSpec) -> jax.Array:
        """Return the matrices of slots, of [experts, ...] or of a stack of them."""

        def on_device(matrices: jax.Array, experts: jax.Array) -> jax.Array:
            if experts.ndim == 1:
                return to_slots(matrices, experts, _AXIS)
            return jax.lax.map(lambda each: to_slots(*each, _AXIS), (matrices, experts))

        return jax.shard_map(on_device, in_specs=(spec, PartitionSpec()), out_specs=spec)(matrices, experts)

    def _owners(self, params: Params) -> Iterator[_Owner]:
        """Yield the layers with experts: entries of a list, or stacks whose layers follow each other."""
        first = 0
        for keys in _experts_of(params):
            matrices = _at(params, keys)[Experts.grouped[0]]
            if matrices.ndim == 4:
                yield _Owner(keys, slice(first, first + len(matrices)))
                first += len(matrices)
            else:
                yield _Owner(keys, first)
                first += 1


def _experts_of(params: Mapping[Any, Any], keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of experts' parameters, in the order of layers: stacks by name, `leading` before `layers`."""
    if Experts.grouped[0] in params:
        yield keys
        return
    for key in sorted(params, key=lambda key: (not isinstance(key, int), _ORDER.get(key, 0), key)):
        if isinstance(params[key], Mapping):
            yield from _experts_of(params[key], (*keys, key))


_ORDER = {"leading": -1, "tail": 1}  # stacks of a decoder beside `layers`, which is between them


def _at(params: Mapping[Any, Any], keys: tuple[Any, ...]) -> Any:
    for key in keys:
        params = params[key]
    return params


def _with(params: Mapping[Any, Any], keys: tuple[Any, ...], new: Any) -> dict[Any, Any]:
    if not keys:
        return new
    return {**params, keys[0]: _with(params[keys[0]], keys[1:], new)}
