"""Loss-spike protection: updates whose gradient norm is far above its running mean are skipped."""

from typing import override

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, Configurable


class SkipSpikes(Configurable):
    """A gradient norm above `factor` times the running mean of earlier ones is a spike: its update is skipped.

    A spike enters the mean as `factor` times the mean. So when norms have risen for good, as after a change of data,
    the mean follows and updates continue after some skipped ones.
    """

    class Config(ConfigBase["SkipSpikes"]):
        factor: float = 5.0
        decay: float = 0.98  # decay of the mean, per finite gradient
        warmup: int = 100  # finite gradients before the first that can be a spike

        @override
        def check_fields(self) -> None:
            self.require("factor", self.factor > 1, "above 1")
            self.require("decay", 0 <= self.decay < 1, "0 or more and below 1")
            self.require("warmup", self.warmup >= 1, "1 or more")

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def init(self) -> dict[str, jax.Array]:
        """Return the state: `mean` (of norms, not debiased), `seen` gradients and `spikes` among them."""
        zero = jnp.zeros((), jnp.int32)
        return {"mean": jnp.zeros((), jnp.float32), "seen": zero, "spikes": zero}

    def update(
        self, norm: jax.Array, finite: jax.Array, state: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return True if `norm` is a spike, and the new state; a norm that is not finite changes nothing."""
        cfg, seen = self._cfg, state["seen"]
        mean = state["mean"] / (1 - cfg.decay ** jnp.maximum(seen, 1))
        spike = finite & (seen >= cfg.warmup) & (norm > cfg.factor * mean)
        counted = jnp.where(spike, cfg.factor * mean, norm)
        new = cfg.decay * state["mean"] + (1 - cfg.decay) * counted
        return spike, {
            "mean": jnp.where(finite, new, state["mean"]),
            "seen": seen + finite.astype(jnp.int32),
            "spikes": state["spikes"] + spike.astype(jnp.int32),
        }
