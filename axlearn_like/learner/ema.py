"""An exponential moving average of the parameters, for evaluation (Polyak & Juditsky 1992)."""

from typing import Any, override

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, Configurable


class EMA(Configurable):
    """average <- decay * average + (1 - decay) * parameters after every applied update, from 0, in float32.

    It is read debiased, divided by 1 - decay**updates: parameters that were loaded after the state was created (from
    another model's files) leave no trace of the initial ones.
    """

    class Config(ConfigBase["EMA"]):
        decay: float = 0.999

        @override
        def check_fields(self) -> None:
            self.require("decay", 0 < self.decay < 1, "above 0 and below 1")

    def __init__(self, cfg: Config):
        self._decay = cfg.decay

    def init(self, params: Any) -> Any:
        """Return zeros like the parameters."""
        return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params)

    def update(self, average: Any, params: Any, applied: jax.Array) -> Any:
        """Return the average after an update; unchanged unless `applied` (a bool scalar)."""
        rate = jnp.where(applied, 1 - self._decay, 0.0)
        return jax.tree.map(lambda a, p: a + rate * (p.astype(jnp.float32) - a), average, params)

    def read(self, average: Any, params: Any, updates: jax.Array) -> Any:
        """Return the average in the parameters' types; before the first update the parameters."""
        weight = jnp.where(updates == 0, 1.0, 1 - self._decay ** updates.astype(jnp.float32))
        return jax.tree.map(lambda a, p: jnp.where(updates == 0, p, a / weight).astype(p.dtype), average, params)
