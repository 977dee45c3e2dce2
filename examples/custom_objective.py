"""A surrogate of your own in the RL objective (docs/how-to/add-an-objective.md).

axl rl examples/custom_objective.py:smooth_grpo --runtime inprocess --set num_steps=2 --set warm_start.num_steps=150
"""

import jax
import jax.numpy as jnp

from experiments.demo.config import demo
from rl.experiment import RLExperiment
from rl.objective.presets import grpo
from rl.objective.surrogate import Surrogate, policy_ratio
from rl.objective.tokens import Tokens


class QuadraticPenalty(Surrogate):
    """Ratio minus a quadratic penalty on its distance from 1, pulling back where PPO's clip only stops.

    SPO (Xie et al. 2024, arXiv 2401.16025) weighs the penalty by |advantage| / (2 epsilon). A surrogate is multiplied
    by the advantage, so its sign is divided out here.
    """

    class Config(Surrogate.Config):
        epsilon: float = 0.2

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.epsilon = cfg.epsilon

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """Return the surrogate [..., T] and where a limit is in force, bool [..., T]."""
        ratio = policy_ratio(tokens, "token")
        penalty = jnp.sign(tokens.advantages) * (ratio - 1.0) ** 2 / (2.0 * self.epsilon)
        beyond = jnp.abs(ratio - 1.0) > self.epsilon
        return ratio - penalty, beyond & tokens.mask


def smooth_grpo(*, seed: int = 0) -> RLExperiment.Config:
    """GRPO demo with this surrogate; advantage, aggregation and importance correction stay as they are."""
    cfg = demo(seed=seed)
    cfg.objective = grpo().set(surrogate=QuadraticPenalty.Config(), old_policy="current", zero_variance="drop")
    return cfg
