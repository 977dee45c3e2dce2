"""Learning-rate schedules: from the number of applied updates (from 0) to a float32 scalar.

Optax's where it has them; `WarmupStableDecay` and `InverseSqrt` are ours, since optax 0.2.8 has neither.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import override

import jax
import jax.numpy as jnp
import optax

from axlearn_like.config import REQUIRED, ConfigBase, Configurable

Schedule = Callable[[jax.Array], jax.Array]
_given: ContextVar[jax.Array | None] = ContextVar("given_rate", default=None)
# From the fraction of the decay that is over (0 to 1) to the fraction of the learning rate that is left (1 to 0).
type DecayShape = Callable[[jax.Array], jax.Array]


def linear(fraction: jax.Array) -> jax.Array:
    """Return 1 - x."""
    return 1.0 - fraction


def cosine(fraction: jax.Array) -> jax.Array:
    """Return half a cosine."""
    return 0.5 * (1.0 + jnp.cos(jnp.pi * fraction))


def one_minus_sqrt(fraction: jax.Array) -> jax.Array:
    """Return 1 - sqrt(x): falls at once and then slowly (arXiv 2405.18392, equation 2)."""
    return 1.0 - jnp.sqrt(fraction)


def exponential(fraction: jax.Array) -> jax.Array:
    """Return ten half-lives, shifted to end at 0: (2**-10x - 2**-10) / (1 - 2**-10)."""
    last = 2.0**-10
    return (jnp.exp2(-10.0 * fraction) - last) / (1.0 - last)


@contextlib.contextmanager
def given_rate(rate: jax.Array | None) -> Iterator[None]:
    """Let `GivenRate`, traced within, be this rate."""
    token = _given.set(rate)
    try:
        yield
    finally:
        _given.reset(token)


class GivenRate(Configurable):
    """The rate that a train step is given with each batch, so that runs at several rates can share its program."""

    class Config(ConfigBase["GivenRate"]):
        pass

    def __init__(self, cfg: Config):
        del cfg

    def __call__(self, count: jax.Array) -> jax.Array:
        """Return the rate."""
        rate = _given.get()
        assert rate is not None, "a step by `at_rate` gives it"
        return rate


class _OptaxSchedule(Configurable):
    """One of the schedules of optax."""

    _schedule: optax.Schedule

    def __call__(self, count: jax.Array) -> jax.Array:
        """Return the learning rate after `count` applied updates."""
        return jnp.asarray(self._schedule(count), jnp.float32)


class Constant(_OptaxSchedule):
    """The same learning rate at every update."""

    class Config(ConfigBase["Constant"]):
        lr: float = REQUIRED

        @override
        def check_fields(self) -> None:
            _check_rates(self, "lr")

    def __init__(self, cfg: Config):
        self._schedule = optax.schedules.constant_schedule(cfg.lr)


class Linear(_OptaxSchedule):
    """A straight line from `start_lr` to `end_lr`, reached at `steps` and kept from then on."""

    class Config(ConfigBase["Linear"]):
        start_lr: float = REQUIRED
        end_lr: float = 0.0
        steps: int = REQUIRED

        @override
        def check_fields(self) -> None:
            _check_rates(self, "start_lr", "end_lr")
            self.require_least(1, "steps")

    def __init__(self, cfg: Config):
        self._schedule = optax.schedules.linear_schedule(cfg.start_lr, cfg.end_lr, cfg.steps)


class WarmupLinear(_OptaxSchedule):
    """Linear from 0 to `peak_lr`, then linear down to `end_lr` at `total_steps`."""

    class Config(ConfigBase["WarmupLinear"]):
        peak_lr: float = REQUIRED
        warmup_steps: int = 0
        total_steps: int = REQUIRED
        end_lr: float = 0.0

        @override
        def check_fields(self) -> None:
            _check_rates(self, "peak_lr", "end_lr")
            self.require("warmup_steps", 0 <= self.warmup_steps < self.total_steps, f"0 to {self.total_steps - 1}")

    def __init__(self, cfg: Config):
        up = optax.schedules.linear_schedule(0.0, cfg.peak_lr, cfg.warmup_steps)
        down = optax.schedules.linear_schedule(cfg.peak_lr, cfg.end_lr, cfg.total_steps - cfg.warmup_steps)
        self._schedule = optax.schedules.join_schedules([up, down], [cfg.warmup_steps])


class WarmupCosine(WarmupLinear):
    """Linear from 0 to `peak_lr`, then half a cosine down to `end_lr` at `total_steps`."""

    def __init__(self, cfg: WarmupLinear.Config):
        first, steps = 0.0 if cfg.warmup_steps else cfg.peak_lr, (cfg.warmup_steps, cfg.total_steps)
        self._schedule = optax.schedules.warmup_cosine_decay_schedule(first, cfg.peak_lr, *steps, cfg.end_lr)


class WarmupStableDecay(Configurable):
    """Linear from 0 to `peak_lr`, constant, and over the last `decay_steps` down to `end_lr`.

    The schedule of MiniCPM (Hu et al. 2024, arXiv 2404.06395). A run is prolonged by starting again from a checkpoint
    of the constant part. `shape` is how it falls, a `DecayShape`; Haegele et al. 2024
    (arXiv 2405.18392) found `one_minus_sqrt` best.
    """

    class Config(ConfigBase["WarmupStableDecay"]):
        peak_lr: float = REQUIRED
        warmup_steps: int = 0
        decay_steps: int = REQUIRED
        total_steps: int = REQUIRED
        end_lr: float = 0.0
        shape: DecayShape = linear

        @override
        def check_fields(self) -> None:
            _check_rates(self, "peak_lr", "end_lr")
            self.require_least(1, "decay_steps")
            constant = self.total_steps - self.decay_steps
            expected = f"0 to total_steps - decay_steps={constant}"
            self.require("warmup_steps", 0 <= self.warmup_steps <= constant, expected)

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def __call__(self, count: jax.Array) -> jax.Array:
        """Return the learning rate after `count` applied updates."""
        cfg = self._cfg
        up = jnp.minimum(count / max(1, cfg.warmup_steps), 1.0) if cfg.warmup_steps else 1.0
        fraction = jnp.clip((count - (cfg.total_steps - cfg.decay_steps)) / cfg.decay_steps, 0.0, 1.0)
        lr = up * (cfg.end_lr + (cfg.peak_lr - cfg.end_lr) * cfg.shape(fraction))
        return jnp.asarray(lr, jnp.float32)


class InverseSqrt(Configurable):
    """Linear from 0 to `peak_lr` at `warmup_steps`, then peak_lr * sqrt(warmup_steps / count).

    Vaswani et al. 2017, arXiv 1706.03762, section 5.3.
    """

    class Config(ConfigBase["InverseSqrt"]):
        peak_lr: float = REQUIRED
        warmup_steps: int = REQUIRED

        @override
        def check_fields(self) -> None:
            _check_rates(self, "peak_lr")
            self.require_least(1, "warmup_steps")

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def __call__(self, count: jax.Array) -> jax.Array:
        """Return the learning rate after `count` applied updates."""
        warmup = self._cfg.warmup_steps
        falling = jnp.sqrt(warmup / jnp.maximum(count, warmup))
        return jnp.asarray(self._cfg.peak_lr * jnp.minimum(count / warmup, falling), jnp.float32)


class JoinSchedules(_OptaxSchedule):
    """Several schedules, one after another: part i starts at `boundaries[i - 1]` and counts from 0 there."""

    class Config(ConfigBase["JoinSchedules"]):
        parts: tuple[ConfigBase, ...] = REQUIRED
        boundaries: tuple[int, ...] = REQUIRED

        @override
        def check_fields(self) -> None:
            rising = all(a < b for a, b in zip((0, *self.boundaries), self.boundaries, strict=False))
            fits = rising and len(self.boundaries) == len(self.parts) - 1
            expected = f"{len(self.parts) - 1} rising numbers of updates above 0, one between two parts"
            self.require("parts", len(self.parts) >= 1, "at least one schedule")
            self.require("boundaries", fits, expected)

    def __init__(self, cfg: Config):
        parts = [part.build() for part in cfg.parts]
        self._schedule = optax.schedules.join_schedules(parts, list(cfg.boundaries))


def _check_rates(cfg: ConfigBase, *fields: str) -> None:
    for field in fields:
        rate = getattr(cfg, field)
        cfg.require(field, math.isfinite(rate) and rate >= 0, "a finite learning rate, 0 or more")
