"""The learner: from gradients to new parameters. Its parts are chosen by config; most are optax transformations."""

from collections.abc import Mapping
from typing import Any, override

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.config import ConfigBase, Configurable, path_of
from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.learner.clipping import SkipSpikes
from axlearn_like.learner.ema import EMA
from axlearn_like.learner.errors import LearnerError
from axlearn_like.learner.expert_bias import BIAS, with_balancing, without_loads
from axlearn_like.learner.grad_norms import grad_norms
from axlearn_like.learner.groups import Groups, ParameterGroup
from axlearn_like.learner.optimizers.elementwise import AdamW
from axlearn_like.learner.schedules import Constant, Schedule
from mesh.devices import platform


class Learner(Configurable):
    """Clipping, direction, learning rate; a non-finite gradient changes nothing but is counted.

    The schedule counts *applied* updates, so a skipped one does not advance it.

    >>> import jax.numpy as jnp
    >>> from axlearn_like.learner import AdamW, Constant, Learner
    >>> learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=0.1)).build()
    >>> state = learner.first_state({"w": jnp.ones(3)})
    >>> state, metrics = learner.next_state(state, {"w": jnp.array([1.0, -1.0, 0.0])})
    >>> [round(float(x), 3) for x in state["params"]["w"]]
    [0.9, 1.1, 1.0]
    >>> sorted(metrics)
    ['grad_norm', 'grad_norm/others', 'lr', 'skipped', 'update_norm']
    """

    class Config(ConfigBase["Learner"]):
        optimizer: ConfigBase = AdamW.Config()
        schedule: ConfigBase = Constant.Config()
        clip_norm: float | None = 1.0  # limit of the global gradient norm; None: no clipping
        clip: ConfigBase | None = None  # another kind (ClipByValue, ClipByBlockRMS), after clipping by the norm
        groups: tuple[ParameterGroup.Config, ...] = ()  # parameters with their own rules; the first that fits applies
        skip_spikes: SkipSpikes.Config | None = None
        ema: EMA.Config | None = None  # average of the parameters, for evaluation
        balance_rate: float = 0.001  # step of the biases that balance experts, if there are any
        state_storage: tuple[ConfigBase, ...] = ()  # storage of moments and EMA: BFloat16State, HostOffload

        @override
        def check(self) -> None:
            super().check()
            self.build()  # optax checks the arguments of its functions, groups their optimizers

        @override
        def check_fields(self) -> None:
            self.require("clip_norm", self.clip_norm is None or self.clip_norm > 0, "above 0, or None")
            self.require_least(0, "balance_rate")

    def __init__(self, cfg: Config):
        self._balance_rate = cfg.balance_rate
        self._schedule: Schedule = cfg.schedule.build()
        self._where, self._clip_norm = path_of(cfg), cfg.clip_norm
        groups = tuple(group.build() for group in cfg.groups)
        self._groups = Groups(groups, cfg.optimizer) if groups else None
        direction = self._groups.transformation if self._groups else cfg.optimizer.build().transformation()
        clip = [] if cfg.clip_norm is None else [optax.clip_by_global_norm(cfg.clip_norm)]
        clip += [] if cfg.clip is None else [cfg.clip.build().transformation()]
        self._transformation = optax.chain(*clip, direction)
        self._spikes: SkipSpikes | None = cfg.skip_spikes and cfg.skip_spikes.build()
        self._ema: EMA | None = cfg.ema and cfg.ema.build()
        self._storage = [storage.build() for storage in cfg.state_storage]

    def init(self, params: Any) -> dict[str, Any]:
        """Return the optimizer state: `applied` and `skipped` int32 counts, and optax's own state.

        If configured, also `spikes` (see `SkipSpikes`) and `ema` (like the parameters that are trained).

        Raises:
            LearnerError: a group or a storage fits nothing.
        """
        large = {"optax": self._transformation.init(params)}
        if self._ema:
            large["ema"] = self._ema.init(self._trained(params))
        applied = jnp.zeros((), jnp.int32)
        state = {"applied": applied, "skipped": jnp.zeros((), jnp.int32), **self._stored(large, applied)}
        return {**state, "spikes": self._spikes.init()} if self._spikes else state

    def update(
        self, grads: Any, opt_state: dict[str, Any], params: Any, *, norms: Mapping[str, jax.Array] | None = None
    ) -> tuple[Any, dict[str, Any], dict[str, jax.Array]]:
        """Return the result of one update.

        Args:
            grads: like `params`, of any float type.
            opt_state: from `init` or the previous `update`.
            norms: `grad_norms` of all parameters, of which `params` are a part; None: they are all.

        Returns:
            New parameters, new optimizer state, and float32 metrics: `grad_norm` (before clipping, without frozen
            parameters), `grad_norm/<group>` of each group of layers (`layer_group`), `lr`, `update_norm` (of what was
            added to the parameters) and `skipped` (updates skipped so far); `spikes` (those skipped as spikes) where
            spikes are skipped.
        """
        loads, grads = grads, without_loads(grads)
        if self._groups:
            grads = self._groups.without_frozen(grads)
        if norms is None:
            norms = grad_norms(grads, self.frozen(grads))
        elif self._clip_norm is not None:  # no second clipping by the part's own norm, which is smaller
            scale = jnp.minimum(1.0, self._clip_norm / norms["grad_norm"])
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        good = jnp.isfinite(norms["grad_norm"])
        small: dict[str, Any] = {}
        if self._spikes:
            spike, small["spikes"] = self._spikes.update(norms["grad_norm"], good, opt_state["spikes"])
            good &= ~spike
        lr = self._schedule(opt_state["applied"])
        new_params, large, update_norm = self._guarded(good, loads, grads, params, self._loaded(opt_state), lr)
        applied = opt_state["applied"] + good.astype(jnp.int32)
        skipped = opt_state["skipped"] + (~good).astype(jnp.int32)
        metrics = {
            **norms,
            "lr": lr,
            "update_norm": update_norm,
            "skipped": skipped.astype(jnp.float32),
        }
        if self._spikes:
            metrics["spikes"] = small["spikes"]["spikes"].astype(jnp.float32)
        return new_params, {"applied": applied, "skipped": skipped, **small, **self._stored(large, applied)}, metrics

    def _guarded(
        self, good: jax.Array, loads: Any, grads: Any, params: Any, large: dict[str, Any], lr: jax.Array
    ) -> tuple[Any, dict[str, Any], jax.Array]:
        """Return the result of `_changed` if the gradient is good; else everything as it is, with norm 0."""
        if platform() != "cpu":
            return self._changed(good, loads, grads, params, large, lr)
        # A select would make XLA's CPU compiler copy every donated array, to keep the old values.
        return jax.lax.cond(
            good,
            lambda: self._changed(jnp.bool_(True), loads, grads, params, large, lr),
            lambda: (params, large, jnp.zeros((), jnp.float32)),
        )

    def _changed(
        self, good: jax.Array, loads: Any, grads: Any, params: Any, large: dict[str, Any], lr: jax.Array
    ) -> tuple[Any, dict[str, Any], jax.Array]:
        """Return parameters and optimizer state after the update, if it is good, and the norm of what was added."""
        direction, new_optax = self._transformation.update(grads, large["optax"], params)
        # Computed once: fused into both the norm and the sum, it would be computed twice from copied arrays.
        direction = no_fuse(direction)
        # Select, never multiply by zero: 0 * nan is nan.
        updates = jax.tree.map(lambda d, p: jnp.where(good, -lr * d, 0.0).astype(p.dtype), direction, params)
        updates = with_balancing(updates, loads, self._balance_rate, good)
        kept = {"optax": jax.tree.map(lambda new, old: jnp.where(good, new, old), new_optax, large["optax"])}
        new_params = optax.apply_updates(params, updates)
        if self._ema:
            kept["ema"] = self._ema.update(large["ema"], self._trained(new_params), good)
        return new_params, kept, optax.tree.norm(updates).astype(jnp.float32)

    def ema_params(self, params: Any, opt_state: dict[str, Any]) -> Any:
        """Return the EMA of the parameters, frozen ones as they are; like `params`, to evaluate or to save.

        Raises:
            LearnerError: the learner has no EMA.
        """
        if self._ema is None:
            raise LearnerError(f"{self._where}.ema: expected EMA.Config(), to evaluate an average; got None")
        large = self._loaded(opt_state)
        read = self._ema.read(large["ema"], self._trained(params), opt_state["applied"])
        masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        return jax.tree.map(lambda a, p: p if masked(a) else a, read, params, is_leaf=masked)

    @property
    def freezes(self) -> bool:
        """True if there are groups of frozen parameters."""
        return self._groups is not None and self._groups.freezes

    def frozen(self, params: Any) -> frozenset[str]:
        """Return the paths of the parameters that no update changes."""
        if self._groups is None:
            return frozenset()
        # The biases that balance experts have no gradient, and move in a frozen group too.
        return frozenset(name for name in self._groups.frozen(params) if not name.endswith(BIAS))

    # ---- its part of a train state; a subclass may learn more than the parameters of one model

    def first_state(self, params: Any) -> dict[str, Any]:
        """Return the parts of the train state before the first update, without the step."""
        return {"params": params, "opt_state": self.init(params)}

    def trained(self, state: Mapping[str, Any]) -> Any:
        """Return what the loss is a function of, out of a train state."""
        return state["params"]

    def held(self, trained: Any) -> frozenset[str]:
        """Return the paths in `trained(state)` of what no gradient is needed of."""
        return self.frozen(trained)

    def next_state(self, state: Mapping[str, Any], grads: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Return the parts of `first_state` after an update, and metrics; `grads` are like `trained(state)`."""
        params, opt_state, metrics = self.update(grads, state["opt_state"], state["params"])
        return {"params": params, "opt_state": opt_state}, metrics

    def placed_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an abstract train state with its optimizer state in the memories of its storage."""
        return {**state, "opt_state": self.placed(state["opt_state"])}

    def placed(self, opt_state: Any) -> Any:
        """Return an abstract optimizer state (`jax.ShapeDtypeStruct`s with shardings) in the memories of its storage.

        Abstract evaluation does not give memory kinds; creating, restoring and compiling for a state need them.
        """
        large = {name: opt_state[name] for name in ("optax", "ema") if name in opt_state}
        for storage in self._storage:
            large = storage.placed(large)
        return {**opt_state, **large}

    def step_shardings(self, state: Any) -> Any:
        """Return the `out_shardings` that `jax.jit` needs for a step's `(state, metrics)`; None: none needed.

        Otherwise donated arrays on the host would be paired with results of the same shape on the devices.

        Args:
            state: the train state, abstract or not, with shardings and in its memories.
        """
        shardings = jax.tree.map(lambda x: x.sharding, state)
        leaves = jax.tree.leaves(shardings)
        if all(sharding.memory_kind in (None, "device") for sharding in leaves):
            return None
        shardings = jax.tree.map(lambda s: s if s.memory_kind else s.with_memory_kind("device"), shardings)
        return shardings, NamedSharding(leaves[0].mesh, PartitionSpec(), memory_kind="device")

    def _trained(self, params: Any) -> Any:
        return self._groups.trained(params) if self._groups else params

    def _stored(self, large: dict[str, Any], count: jax.Array) -> dict[str, Any]:
        for storage in self._storage:
            large = storage.store(large, count)
        return large

    def _loaded(self, opt_state: dict[str, Any]) -> dict[str, Any]:
        large = {name: opt_state[name] for name in ("optax", "ema") if name in opt_state}
        for storage in reversed(self._storage):
            large = storage.load(large)
        return large
