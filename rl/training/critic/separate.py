"""The critic: a model with a score head that predicts the reward from every state, with a learner of its own.

It sees whole sequences, a row each, and is updated by a batch before the policy is; both have seen the same batches at
every checkpoint, which holds its state beside the policy's.
"""

from collections.abc import Mapping, Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from axlearn_like.config import REQUIRED, ConfigBase, path_of
from axlearn_like.layers.base import Params, bind, first_params
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import Learner
from axlearn_like.training.head_losses import one_score
from axlearn_like.training.losses import Metrics, with_aux
from axlearn_like.training.program import describe_state
from axlearn_like.training.step import State, init_state, make_train_step
from mesh import shard_batch
from mesh.sharding import shard_like
from rl.objective import CriticConfig
from rl.protocol.headers import GroupHeader
from rl.protocol.messages import RolloutData
from rl.training.batching import PaddedRows
from rl.training.critic.values import RolloutValues, value_loss, values_of_rows

_STATE = "critic"  # key of its state in a checkpoint
_OF_TOKENS = ("returns", "values", "weights")  # arrays of an update beside the rows


class Critic(RolloutValues):
    """V of the state in which each token was drawn, and its updates.

    The loss is half the squared error to the returns, a mean over the batch's sampled tokens; with `value_clip` the
    larger of this and that of the clipped value.
    """

    class Config(CriticConfig["Critic"]):
        learner: Learner.Config = REQUIRED
        # Model with a ScoreHead of one output. None: the policy's model with such a head, which begins as version 0 of
        # the policy and predicts 0.
        model: ConfigBase | None = None
        value_clip: float | None = 0.2  # limit of a value's change since before the update (PPO); None: no limit
        epochs: int = 1  # updates for each batch

        @override
        def check_fields(self) -> None:
            self.require_least(1, "epochs")
            self.require("value_clip", self.value_clip is None or self.value_clip > 0, "a number above 0, or None")
            head = getattr(self.model, "head", None)
            scores = isinstance(head, ScoreHead.Config) and head.outputs == 1
            self.require("model", self.model is None or scores, "a decoder with head=ScoreHead.Config(), or None")

        def of_policy(self, policy: ConfigBase[Any]) -> ConfigBase[Any]:
            """Return the critic's model, given the policy's (ConfigError: of a smaller vocabulary)."""
            if self.model is None:
                return policy.clone(head=ScoreHead.Config())
            own, wanted = (getattr(one, "vocab_size", 0) for one in (self.model, policy))
            self.require("model", own >= wanted, f"a vocab_size of {wanted} or more, as the policy has; it has {own}")
            return self.model

        def check_policy(self, policy: ConfigBase[Any], mesh: Any) -> None:
            """Refuse a model that does not fit the mesh, which is set, or the policy (UserError)."""
            describe_state(self.of_policy(policy), self.learner.build(), mesh, f"{path_of(self)}.model")

    def __init__(
        self,
        cfg: Config,
        *,
        policy: ConfigBase[Any],
        sizes: PaddedRows,
        microbatches: int = 1,
    ):
        """Describe the state; the mesh is set.

        Args:
            sizes: the greatest numbers of tokens, and of what the rows of a batch are a multiple.
            microbatches: parts whose gradients are accumulated.
        """
        super().__init__(sizes)
        self._cfg, learner = cfg, cfg.learner.build()
        self._learner, mesh = learner, jax.sharding.get_mesh()
        graphdef, self._described, self._init = describe_state(cfg.of_policy(policy), learner, mesh)
        self._state: State = {}
        everywhere = NamedSharding(mesh, jax.P())
        self.score: Any = jax.jit(
            lambda params, rows: _values(bind(graphdef, params), rows)[0], out_shardings=everywhere
        )

        def loss(params: Params, rows: Mapping[str, jax.Array]) -> tuple[jax.Array, Metrics]:
            values, aux = _values(bind(graphdef, params), rows)
            found, metrics = value_loss(
                values, {name: shard_like(rows[name], values) for name in _OF_TOKENS}, clip=cfg.value_clip
            )
            return with_aux(found, metrics, aux, jnp.sum(rows["weights"]))

        self.step: Any = make_train_step(loss, learner, microbatches, like=self._described)  # function of (state, rows)

    @override
    def reads(self, state: State) -> Params:
        return self._state["params"]

    @override
    def describe_reads(self, state: State) -> Params:
        return self._described["params"]

    @override
    def start(self, policy: Params) -> None:
        """Begin with version 0 of the policy and a head of zeros, or with a model of its own."""
        shardings = jax.tree.map(lambda a: a.sharding, self._described)
        if self._cfg.model is not None:
            params = first_params(self._init, 0, self._described["params"])
            born = jax.jit(lambda params: init_state(params, self._learner), out_shardings=shardings, donate_argnums=0)
            self._state = born(params)
            return

        def begin(params: Params) -> State:
            head = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._described["params"]["head"])
            trunk = {name: jax.tree.map(jnp.copy, params[name]) for name in self._described["params"] if name != "head"}
            return init_state({**trunk, "head": head}, self._learner)

        self._state = jax.jit(begin, out_shardings=shardings)(policy)

    @override
    def describe(self) -> dict[str, Any]:
        return {_STATE: self._described}

    def describe_update(self, rollouts: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of an update by so many rollouts, sharded as `shard_batch` does."""
        rows = self.describe_rows(rollouts)
        one = rows["tokens"]
        weighed = jax.ShapeDtypeStruct(one.shape, jnp.float32, sharding=one.sharding)
        return {**rows, **dict.fromkeys(_OF_TOKENS, weighed)}

    @override
    def saved(self) -> dict[str, Any]:
        return {_STATE: self._state}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._state = state.pop(_STATE)

    @override
    def update(
        self,
        headers: Sequence[GroupHeader],
        contents: RolloutData,
        values: np.ndarray,
        returns: np.ndarray,
        mask: np.ndarray,
    ) -> dict[str, float]:
        rows, own = self._rows(headers, contents)
        arrays = {name: np.zeros(rows["tokens"].shape, np.float32) for name in _OF_TOKENS}
        for row, (number, (prompt, rollout)) in enumerate(own):
            size = len(rollout.tokens)
            place = row, slice(len(prompt) - 1, len(prompt) - 1 + size)
            arrays["returns"][place], arrays["values"][place] = returns[number, :size], values[number, :size]
            arrays["weights"][place] = mask[number, :size] / mask.sum()
        batch = shard_batch({**rows, **arrays}, rows=self._count(headers), by_length=False)
        for _ in range(self._cfg.epochs):
            self._state, metrics = self.step(self._state, batch)
        names = ("value_loss", "value_clip_fraction", "grad_norm")
        found = {name if name.startswith("value") else f"critic_{name}": float(metrics[name]) for name in names}
        return {**found, **super().update(headers, contents, values, returns, mask)}


def _values(model: Any, rows: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Return float32 values [rows, length] of the states after each token, and the layers' auxiliary outputs."""
    return values_of_rows(model, rows, lambda x, context: one_score(model.scores(x, context), "Critic"))
