"""The learner: how gradients change parameters. Optimizer and schedule by config, over optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axlearn_like.balancing import with_balancing, without_loads
from axlearn_like.config import REQUIRED, ConfigBase, Configurable

Schedule = Callable[[jax.Array], jax.Array]


class Constant(Configurable):
    """The same learning rate at every update."""

    class Config(ConfigBase["Constant"]):
        lr: float = REQUIRED

    def __init__(self, cfg: Config):
        self._schedule = optax.schedules.constant_schedule(cfg.lr)

    def __call__(self, count: jax.Array) -> jax.Array:
        return jnp.asarray(self._schedule(count), jnp.float32)


class WarmupCosine(Configurable):
    """Linear from 0 to `peak_lr`, then half a cosine down to `end_lr` at `total_steps`."""

    class Config(ConfigBase["WarmupCosine"]):
        peak_lr: float = REQUIRED
        warmup_steps: int = 0
        total_steps: int = REQUIRED
        end_lr: float = 0.0

    def __init__(self, cfg: Config):
        _check_steps(cfg.warmup_steps, cfg.total_steps, "WarmupCosine")
        self._schedule = optax.schedules.warmup_cosine_decay_schedule(
            0.0 if cfg.warmup_steps else cfg.peak_lr,
            cfg.peak_lr,
            cfg.warmup_steps,
            cfg.total_steps,
            cfg.end_lr,
        )

    def __call__(self, count: jax.Array) -> jax.Array:
        return jnp.asarray(self._schedule(count), jnp.float32)


class WarmupLinear(Configurable):
    """Linear from 0 to `peak_lr`, then linear down to `end_lr` at `total_steps`."""

    class Config(ConfigBase["WarmupLinear"]):
        peak_lr: float = REQUIRED
        warmup_steps: int = 0
        total_steps: int = REQUIRED
        end_lr: float = 0.0

    def __init__(self, cfg: Config):
        _check_steps(cfg.warmup_steps, cfg.total_steps, "WarmupLinear")
        up = optax.schedules.linear_schedule(0.0, cfg.peak_lr, cfg.warmup_steps)
        down = optax.schedules.linear_schedule(cfg.peak_lr, cfg.end_lr, cfg.total_steps - cfg.warmup_steps)
        self._schedule = optax.schedules.join_schedules([up, down], [cfg.warmup_steps])

    def __call__(self, count: jax.Array) -> jax.Array:
        return jnp.asarray(self._schedule(count), jnp.float32)


def _check_steps(warmup_steps: int, total_steps: int, name: str) -> None:
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"{name}.Config: expected 0 <= warmup_steps < total_steps, "
            f"got warmup_steps={warmup_steps}, total_steps={total_steps}"
        )


class AdamW(Configurable):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101).

    The direction only: the learner multiplies by minus the learning rate. Moments are float32 as
    the parameters are.
    """

    class Config(ConfigBase["AdamW"]):
        b1: float = 0.9
        b2: float = 0.95
        eps: float = 1e-8
        weight_decay: float = 0.0

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def transformation(self) -> optax.GradientTransformation:
        """The un-scaled direction as an optax transformation."""
        return optax.chain(
            optax.scale_by_adam(self._cfg.b1, self._cfg.b2, self._cfg.eps),
            optax.add_decayed_weights(self._cfg.weight_decay, mask=decay_mask),
        )


def decay_mask(params: Any) -> Any:
    """True for parameters that weight decay may shrink: matrices, but not scales and biases.

    The number of axes alone does not tell: the norm scales of a scanned stack are [layers, dim],
    two axes like a matrix. The name does, because every layer calls these parameters `scale` or
    `bias` (with the shape suffix, as in `q_bias_nh`); so a name decides, and arrays with fewer than
    two axes are spared whatever they are called.
    """

    def decays(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        words = jax.tree_util.keystr(path[-1:], simple=True).split("_") if path else []
        return leaf.ndim >= 2 and not {"scale", "bias"} & set(words)

    return jax.tree_util.tree_map_with_path(decays, params)


class Learner(Configurable):
    """Clip, direction, learning rate; a non-finite gradient changes nothing but is counted.

    The schedule counts *applied* updates, so a skipped one does not advance it.
    """

    class Config(ConfigBase["Learner"]):
        optimizer: ConfigBase = AdamW.Config()
        schedule: ConfigBase = Constant.Config()
        clip_norm: float | None = 1.0  # of the global gradient norm; None: no clipping
        balance_rate: float = 0.001  # step of the biases that balance experts, where there are any

    def __init__(self, cfg: Config):
        if cfg.clip_norm is not None and cfg.clip_norm <= 0:
            raise ValueError(f"Learner.Config.clip_norm: expected > 0 or None, got {cfg.clip_norm}")
        if cfg.balance_rate < 0:
            raise ValueError(f"Learner.Config.balance_rate: expected 0 or more, got {cfg.balance_rate}")
        self._schedule: Schedule = cfg.schedule.build()
        self._balance_rate = cfg.balance_rate
        clip = [] if cfg.clip_norm is None else [optax.clip_by_global_norm(cfg.clip_norm)]
        self._transformation = optax.chain(*clip, cfg.optimizer.build().transformation())

    def init(self, params: Any) -> dict[str, Any]:
        """Optimizer state: `applied` and `skipped` int32 counts, and optax's own state."""
        return {
            "applied": jnp.zeros((), jnp.int32),
            "skipped": jnp.zeros((), jnp.int32),
            "optax": self._transformation.init(params),
        }

    def update(
        self, grads: Any, opt_state: dict[str, Any], params: Any
    ) -> tuple[Any, dict[str, Any], dict[str, jax.Array]]:
        """One update.

        Args:
            grads: like `params`, of any float type.
            opt_state: from `init` or the previous `update`.
            params: the parameters to change.

        Returns:
            New parameters, new optimizer state, and float32 metrics: `grad_norm` (before clipping),
            `lr`, `update_norm` (of what was added to the parameters) and `skipped` (updates skipped
            so far).
        """
        loads, grads = grads, without_loads(grads)
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        finite = jnp.isfinite(grad_norm)
        lr = self._schedule(opt_state["applied"])
        direction, new_optax = self._transformation.update(grads, opt_state["optax"], params)
        # Select, never multiply by zero: 0 * nan is nan.
        updates = jax.tree.map(lambda d, p: jnp.where(finite, -lr * d, 0.0).astype(p.dtype), direction, params)
        updates = with_balancing(updates, loads, self._balance_rate, finite)
        new_state = {
            "applied": opt_state["applied"] + finite.astype(jnp.int32),
            "skipped": opt_state["skipped"] + (~finite).astype(jnp.int32),
            "optax": jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_optax, opt_state["optax"]),
        }
        metrics = {
            "grad_norm": grad_norm,
            "lr": lr,
            "update_norm": optax.tree.norm(updates),
            "skipped": new_state["skipped"].astype(jnp.float32),
        }
        return optax.apply_updates(params, updates), new_state, metrics
