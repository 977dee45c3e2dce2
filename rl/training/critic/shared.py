"""A critic that shares the policy's trunk: a value head on its final hidden states, learned in the policy's update.

The head is no part of the policy: it is in the trainer's state and checkpoints, and never pushed to workers.
"""

from collections.abc import Mapping
from typing import Any, override

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import Learner
from axlearn_like.training.losses import Metrics
from axlearn_like.training.step import State
from rl.objective import CriticConfig
from rl.training.batching import PaddedRows
from rl.training.critic.values import RolloutValues, value_loss, values_of_rows

_STATE = "critic"  # key of the head's parameters and optimizer state in the train state
_POLICY, _HEAD = "policy", "critic"  # keys of what is trained


class SharedCritic(RolloutValues):
    """V by a linear head on the policy's hidden states.

    An update adds `coef` times the value loss of `Critic` to the policy's loss, under the same weights of tokens, so
    that it trains the trunk too, and computes both from one forward pass. The head has its own learner.
    """

    class Config(CriticConfig["SharedCritic"]):
        learner: Learner.Config = REQUIRED  # learner of the head; the policy's learner updates the trunk
        coef: float = 0.1  # weight of the value loss beside the policy's
        detach: bool = False  # the value loss trains the head alone: its gradient ends at the hidden states
        value_clip: float | None = 0.2  # limit of a value's change since before the update (PPO); None: no limit

        @property
        @override
        def in_update(self) -> bool:
            return True

        @override
        def check_fields(self) -> None:
            self.require("coef", self.coef > 0, "a number above 0")
            self.require("value_clip", self.value_clip is None or self.value_clip > 0, "a number above 0, or None")

        def check_policy(self, policy: ConfigBase[Any], mesh: Any) -> None:
            """Refuse a policy that the head does not fit; the mesh is set."""
            self.require("learner", hasattr(policy, "dim"), "the learner of a Critic.Config: the policy has no `dim`")
            build_abstract(_head(policy))

    separate = False

    def __init__(
        self,
        cfg: Config,
        *,
        policy: ConfigBase[Any],
        graphdef: nnx.GraphDef[Any],
        sizes: PaddedRows,
    ):
        """Make the program that scores; the mesh is set.

        Args:
            sizes: the greatest numbers of tokens, and of what the rows of a batch are a multiple.
        """
        super().__init__(sizes)
        term = ValueTerm(cfg, policy)

        def score(params: Params, rows: Mapping[str, jax.Array]) -> jax.Array:
            model = bind(graphdef, params[_POLICY])
            return values_of_rows(model, rows, lambda x, context: term.read(params, x))[0]

        self.score: Any = jax.jit(score, out_shardings=NamedSharding(jax.sharding.get_mesh(), jax.P()))

    @override
    def reads(self, state: State) -> Params:
        return {_POLICY: state["params"], _HEAD: state[_STATE]["params"]}


class ValueTerm:
    """The value loss as a part of the policy's; it is made with the mesh set."""

    def __init__(self, cfg: SharedCritic.Config, model: ConfigBase[Any]):
        self._cfg, self._graphdef = cfg, split(build_abstract(_head(model)))[0]

    def policy(self, params: Params) -> Params:
        """Return the policy's parameters, out of those that `JointLearner` trains."""
        return params[_POLICY]

    def read(self, params: Params, x: jax.Array) -> jax.Array:
        """Return float32 values [batch, length] of final hidden states [batch, length, dim]."""
        head: Any = bind(self._graphdef, params[_HEAD])
        return head(jax.lax.stop_gradient(x) if self._cfg.detach else x, None)[..., 0]

    def add(
        self, loss: jax.Array, metrics: Metrics, values: jax.Array, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """Return the policy's loss and metrics with those of the values; all arrays of tokens [..., T].

        Args:
            loss: the objective's.
            metrics: the objective's; its `loss` stays the objective's own.
            values: values of the tokens' states.
            batch: arrays of an objective that learns values.
        """
        arrays = {"returns": batch["returns"], "values": batch["values"], "weights": batch["metric_weights"]}
        found, figures = value_loss(values, arrays, clip=self._cfg.value_clip)
        return loss + self._cfg.coef * found, {**metrics, **jax.lax.stop_gradient(figures)}


class JointLearner(Learner):
    """The policy's learner, and the value head's, by one gradient; the head begins with zeros."""

    def __init__(self, policy: Learner.Config, head: Learner.Config, model: ConfigBase[Any]):
        super().__init__(policy)
        self._head, self._model = head.build(), model

    @override
    def first_state(self, params: Any) -> dict[str, Any]:
        head = jax.tree.map(jnp.zeros_like, split(_head(self._model).build(rngs=nnx.Rngs(0)))[1])
        return {**super().first_state(params), _STATE: self._head.first_state(head)}

    @override
    def trained(self, state: Mapping[str, Any]) -> Any:
        return {_POLICY: state["params"], _HEAD: state[_STATE]["params"]}

    @override
    def held(self, trained: Any) -> frozenset[str]:
        return frozenset(f"{_POLICY}/{name}" for name in self.frozen(trained[_POLICY]))

    @override
    def next_state(self, state: Mapping[str, Any], grads: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        policy, metrics = super().next_state(state, grads[_POLICY])
        head, own = self._head.next_state(state[_STATE], grads[_HEAD])
        return {**policy, _STATE: head}, {**metrics, "critic_grad_norm": own["grad_norm"]}

    @override
    def placed_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().placed_state(state), _STATE: self._head.placed_state(state[_STATE])}


def _head(model: ConfigBase[Any]) -> ScoreHead.Config:
    """Return a head for the hidden states of a policy."""
    dim: Any = getattr(model, "dim", REQUIRED)
    return ScoreHead.Config(dim=dim)
