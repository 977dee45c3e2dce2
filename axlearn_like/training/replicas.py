"""Replicas of popular experts in training: planned from counts of tokens, and again every so many updates."""

from collections.abc import Mapping
from typing import Any, Literal, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.layers.moe.placement.balance import make_plan
from axlearn_like.layers.moe.placement.plan import Domains, ExpertPlan
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
        threshold: int = 1  # hosts or slices that each expert is in at least; 1: replicas serve balance alone
        domain: Literal["host", "slice"] = "host"  # devices that fail together, for the threshold

        @override
        def check_fields(self) -> None:
            self.require_least(0, "slots")
            self.require_least(1, "every", "threshold")

        def check_layout(self, layout: RoutingLayout | None, mesh: Mesh) -> RoutingLayout:
            """Return the model's layout (ConfigError: no mixtures of one kind, or nothing to place them on)."""
            self.require("slots", layout is not None, "replicas of a model with mixtures of experts, all of one kind")
            self.require("slots", mesh.shape[_AXIS] > 1, "a mesh with an axis expert of 2 devices or more")
            self.require("slots", mesh.shape["pipeline"] == 1, "a mesh without a pipeline axis")
            assert layout is not None
            return layout

        def domains(self, layout: RoutingLayout, mesh: Mesh) -> Domains:
            """Return the devices of the axis `expert` and their slots, by host or slice where these divide it."""
            devices = mesh.shape[_AXIS]
            order = [mesh.axis_names.index(_AXIS), *(i for i, name in enumerate(mesh.axis_names) if name != _AXIS)]
            columns = mesh.devices.transpose(order).reshape(devices, -1)
            name = "process_index" if self.domain == "host" else "slice_index"
            failing = [frozenset(getattr(d, name, 0) for d in column) for column in columns]
            together = failing.count(failing[0])
            blocks = [failing[i : i + together] for i in range(0, devices, together)]
            if any(len(set(block)) > 1 for block in blocks) or len({b[0] for b in blocks}) < len(blocks):
                together = 1
            return Domains(devices // together, together, layout.num_experts // devices + self.slots)

        def describe(self, layout: RoutingLayout, mesh: Mesh) -> dict[str, Any]:
            """Return the described arrays that `Replicas.added` adds to a batch."""
            where = NamedSharding(mesh, jax.P())
            shape = layout.num_layers, self.domains(layout, mesh).all_slots
            table: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
            return {SHARED: {_PLACEMENT: Placement(table, table)}}

    def __init__(self, cfg: Config, *, layout: RoutingLayout | None, mesh: Mesh, events: EventLog):
        self._cfg, self._mesh, self._events = cfg, mesh, events
        self._layout = cfg.check_layout(layout, mesh)
        self._domains = cfg.domains(self._layout, mesh)
        self._loads: Any = jnp.ones((len(self._layout.layers), self._layout.num_experts), jnp.float32)
        self._updates = 0
        self._add: Any = jax.jit(jnp.add)
        self._place(make_plan(np.asarray(self._loads), self._domains, cfg.threshold))
        sizes = {"domains": self._domains.count, "slots": self._domains.all_slots, "threshold": self._plan.threshold}
        events.append("trainer", "replicas_began", experts=self._layout.num_experts, **sizes)

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
        self._place(make_plan(loads, self._domains, self._cfg.threshold))
        home = loads.reshape(len(loads), self._mesh.shape[_AXIS], -1).sum(axis=2)
        self._events.append(
            "trainer",
            "replicas_planned",
            step=step,
            busiest_to_mean=round(self._plan.busiest_to_mean(loads), 4),
            busiest_to_mean_before=round(before.busiest_to_mean(loads), 4),
            busiest_to_mean_without=round(float((home.max(axis=1) / home.mean(axis=1)).max()), 4),
            most_replicas=int(self._plan.replicas(self._layout.num_experts).max()),
            moves=int(np.sum(self._plan.experts != before.experts)),
            threshold=self._plan.threshold,
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
        plan = ExpertPlan(experts, ends, self._plan.devices, self._plan.threshold)
        try:
            plan.check(len(self._layout.layers), self._layout.num_experts, self._domains.all_slots)
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
