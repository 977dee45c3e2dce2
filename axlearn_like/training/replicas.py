"""Replicas of popular experts in training: planned from counts of tokens, and again every so many updates."""

from collections.abc import Mapping
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.moe.placement import ExpertPlan, make_plan
from axlearn_like.layers.moe.replicas import Placement, placed
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.run.events import EventLog
from axlearn_like.training.losses import LossFn, Metrics
from axlearn_like.training.step import SHARED
from mesh.errors import UserError

LOAD = "expert_load_by_layer"  # metric of layers that compute by a plan: float32 [layers with experts, experts]
_PLACEMENT = "placement"  # name under `SHARED` in a batch
_AXIS = "expert"


class Replicas(Configurable):
    """The plan that a trainer's mixtures compute by.

    Plans are functions of counts that all processes have, so all make the same one.
    """

    class Config(ConfigBase["Replicas"]):
        slots: int = 1  # experts that a device computes beside its part of all, each from its home in every pass
        every: int = 200  # updates after which replicas are planned again, from the counts of those updates

        @override
        def check_fields(self) -> None:
            self.require_least(0, "slots")
            self.require_least(1, "every")

        def check_layout(self, layout: RoutingLayout | None, mesh: Mesh) -> RoutingLayout:
            """Return the model's layout (ConfigError: no mixtures of one kind, or nothing to place them on)."""
            self.require("slots", layout is not None, "replicas of a model with mixtures of experts, all of one kind")
            self.require("slots", mesh.shape[_AXIS] > 1, "a mesh with an axis expert of 2 devices or more")
            self.require("slots", mesh.shape["pipeline"] == 1, "a mesh without a pipeline axis")
            assert layout is not None
            return layout

        def device_slots(self, layout: RoutingLayout, mesh: Mesh) -> int:
            """Return the slots of each device of the axis `expert`."""
            return layout.num_experts // mesh.shape[_AXIS] + self.slots

        def describe(self, layout: RoutingLayout, mesh: Mesh) -> dict[str, Any]:
            """Return the described arrays that `Replicas.added` adds to a batch."""
            where = NamedSharding(mesh, jax.P())
            shape = layout.num_layers, mesh.shape[_AXIS] * self.device_slots(layout, mesh)
            table: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
            return {SHARED: {_PLACEMENT: Placement(table, table)}}

    def __init__(self, cfg: Config, *, layout: RoutingLayout | None, mesh: Mesh, events: EventLog):
        self._cfg, self._mesh, self._events = cfg, mesh, events
        self._layout = cfg.check_layout(layout, mesh)
        self._devices, self._slots = mesh.shape[_AXIS], cfg.device_slots(self._layout, mesh)
        self._loads: Any = jnp.ones((len(self._layout.layers), self._layout.num_experts), jnp.float32)
        self._updates = 0
        self._add: Any = jax.jit(jnp.add)
        self._place(make_plan(np.asarray(self._loads), self._devices, self._slots))
        slots = self._devices * self._slots
        events.append("trainer", "replicas_began", experts=self._layout.num_experts, slots=slots)

    def added(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with the plan that the update's mixtures compute by."""
        return {**batch, SHARED: {_PLACEMENT: self._table}}

    def updated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Count an update's choices; after every so many, plan again for the next ones."""
        loads = metrics[LOAD]
        self._loads = loads if self._updates == 0 else self._add(self._loads, loads)
        self._updates += 1
        if self._updates < self._cfg.every:
            return
        loads, before, self._updates = np.asarray(self._loads), self._plan, 0
        self._place(make_plan(loads, self._devices, self._slots))
        home = loads.reshape(len(loads), self._devices, -1).sum(axis=2)
        self._events.append(
            "trainer",
            "replicas_planned",
            step=step,
            busiest_to_mean=round(self._plan.busiest_to_mean(loads), 4),
            busiest_to_mean_before=round(before.busiest_to_mean(loads), 4),
            busiest_to_mean_without=round(float((home.max(axis=1) / home.mean(axis=1)).max()), 4),
            most_replicas=int(self._plan.replicas(self._layout.num_experts).max()),
            moves=int(np.sum(self._plan.experts != before.experts)),
        )

    def state(self) -> dict[str, Any]:
        """Return the plan and the counts since, JSON-able, for a checkpoint: a resumed run computes the same bits."""
        arrays = {"experts": self._plan.experts, "ends": self._plan.ends, "loads": np.asarray(self._loads)}
        return {name: array.tolist() for name, array in arrays.items()} | {"updates": self._updates}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the plan of a checkpoint; with none, or one for other devices, begin as a new run does."""
        if state is None:
            return
        experts, ends = (np.asarray(state[name], np.int32) for name in ("experts", "ends"))
        plan = ExpertPlan(experts, ends, self._devices)
        try:
            plan.check(len(self._layout.layers), self._layout.num_experts, self._devices * self._slots)
        except UserError as other:
            self._events.append("trainer", "replicas_dropped", reason=str(other))
            return
        self._loads, self._updates = jnp.asarray(state["loads"], jnp.float32), int(state["updates"])
        self._place(plan)

    def _place(self, plan: ExpertPlan) -> None:
        self._plan = plan
        layers, where = list(self._layout.layers), NamedSharding(self._mesh, jax.P())

        def whole(rows: Any) -> jax.Array:
            table = np.zeros((self._layout.num_layers, rows.shape[1]), np.int32)
            table[layers] = rows
            return jax.device_put(table, where)

        self._table = Placement(whole(plan.experts), whole(plan.ends))


def by_plan(loss_fn: LossFn) -> LossFn:
    """Return the loss of a batch that may have a plan, by which mixtures then compute."""

    def planned(params: Any, batch: Any) -> tuple[jax.Array, Metrics]:
        if SHARED not in batch:
            return loss_fn(params, batch)
        with placed(batch[SHARED][_PLACEMENT]):
            return loss_fn(params, {name: x for name, x in batch.items() if name != SHARED})

    return planned
