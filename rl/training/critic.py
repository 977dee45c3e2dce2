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

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, path_of
from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.contexts.packed import PackedContext, require_complete_rows
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.learner import Learner
from axlearn_like.training.head_losses import one_score
from axlearn_like.training.losses import Metrics, with_aux
from axlearn_like.training.program import describe_state
from axlearn_like.training.step import State, init_state, make_train_step
from mesh import shard_batch
from mesh.batches import local_rows
from mesh.rules import partition
from mesh.sharding import shard_like
from rl.roles.headers import GroupHeader
from rl.roles.messages import Contents
from rl.training.logprobs import fill_rows, row_length
from rl.training.program import padded

_STATE = "critic"  # key of its state in a checkpoint


class Critic(Configurable):
    """V of the state in which each token was drawn, and its updates.

    The loss is half the squared error to the returns, a mean over the batch's sampled tokens; with `value_clip` the
    larger of this and that of the clipped value.
    """

    class Config(ConfigBase["Critic"]):
        learner: Learner.Config = REQUIRED
        # With a ScoreHead of one output. None: the policy's model with such a head, which begins as version 0 of the
        # policy and predicts 0.
        model: ConfigBase | None = None
        value_clip: float | None = 0.2  # how far a value may go from that before the update (PPO); None: any
        epochs: int = 1  # updates by each batch

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
        max_prompt: int,
        max_new: int,
        row_multiple: int,
        microbatches: int = 1,
    ):
        """Describe the state; the mesh is set.

        Args:
            cfg: config of the critic.
            policy: config of its model.
            max_prompt: tokens.
            max_new: tokens.
            row_multiple: multiple of the rows of a batch.
            microbatches: number of microbatches whose gradients are accumulated.
        """
        self._cfg, learner = cfg, cfg.learner.build()
        self._learner, mesh = learner, jax.sharding.get_mesh()
        graphdef, self._described, self._init = describe_state(cfg.of_policy(policy), learner, mesh)
        self._length, self._row_multiple, self._max_new = row_length(max_prompt, max_new), row_multiple, max_new
        self._state: State = {}
        # Of (parameters, rows) and (state, rows): values before each token, and an update.
        everywhere = NamedSharding(mesh, jax.P())
        self.score: Any = jax.jit(
            lambda params, rows: _values(bind(graphdef, params), rows)[0], out_shardings=everywhere
        )

        def loss(params: Params, rows: Mapping[str, jax.Array]) -> tuple[jax.Array, Metrics]:
            values, aux = _values(bind(graphdef, params), rows)
            others = [shard_like(rows[name], values) for name in ("returns", "values", "weights")]
            found, metrics = value_loss(values, *others, clip=cfg.value_clip)
            return with_aux(found, metrics, aux, jnp.sum(rows["weights"]))

        self.step: Any = make_train_step(loss, learner, microbatches, like=self._described)

    def start(self, policy: Params) -> None:
        """Begin with version 0 of the policy and a head of zeros, or with a model of its own."""
        shardings = jax.tree.map(lambda a: a.sharding, self._described)
        if self._cfg.model is not None:
            self._state = jax.jit(self._init, out_shardings=shardings)(jax.random.key(0))
            return

        def begin(params: Params) -> State:
            head = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._described["params"]["head"])
            trunk = {name: jax.tree.map(jnp.copy, params[name]) for name in self._described["params"] if name != "head"}
            return init_state({**trunk, "head": head}, self._learner)

        self._state = jax.jit(begin, out_shardings=shardings)(policy)

    def describe(self) -> dict[str, Any]:
        """Return the abstract arrays of `saved`."""
        return {_STATE: self._described}

    def describe_rows(self, rollouts: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of an update by so many rollouts, sharded as `shard_batch` does; scoring takes three."""
        sharding = NamedSharding(jax.sharding.get_mesh(), partition("batch", None) or jax.P())
        shape = padded(rollouts, self._row_multiple), self._length
        kinds = {"tokens": jnp.int32, "positions": jnp.int32, "segment_ids": jnp.int32}
        kinds |= dict.fromkeys(("returns", "values", "weights"), jnp.float32)
        return {name: jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for name, kind in kinds.items()}

    def saved(self) -> dict[str, Any]:
        """Return arrays for a checkpoint, by their keys in it."""
        return {_STATE: self._state}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `saved` returned, out of the state of a checkpoint."""
        self._state = state.pop(_STATE)

    def values(self, headers: Sequence[GroupHeader], contents: Contents) -> np.ndarray:
        """Return V before each token of every rollout, float64 [rollouts, max_new], zero behind them.

        Each process fills its own rows, of which it has the contents; the values of all come to every process.
        """
        rows, _ = self._rows(headers, contents)
        scored = np.asarray(self.score(self._state["params"], shard_batch(rows, rows=self._count(headers))))
        rollouts = [(header.prompt_length - 1, r.length) for header in headers for r in header.rollouts]
        found = np.zeros((len(rollouts), self._max_new))
        for number, (at, size) in enumerate(rollouts):
            found[number, :size] = scored[number, at : at + size]
        return found

    def update(
        self,
        headers: Sequence[GroupHeader],
        contents: Contents,
        values: np.ndarray,
        returns: np.ndarray,
        mask: np.ndarray,
    ) -> dict[str, float]:
        """Update by a batch, of which something is live, and return metrics.

        Args:
            headers: headers of the batch.
            contents: as of `values`.
            values: as of `values`.
            returns: targets, [rollouts, max_new].
            mask: bool, tokens that count.
        """
        rows, own = self._rows(headers, contents)
        shape = rows["tokens"].shape
        arrays = {name: np.zeros(shape, np.float32) for name in ("returns", "values", "weights")}
        for row, (number, (prompt, rollout)) in enumerate(own):
            size = len(rollout.tokens)
            place = row, slice(len(prompt) - 1, len(prompt) - 1 + size)
            arrays["returns"][place], arrays["values"][place] = returns[number, :size], values[number, :size]
            arrays["weights"][place] = mask[number, :size] / mask.sum()
        batch = shard_batch({**rows, **arrays}, rows=self._count(headers))
        for _ in range(self._cfg.epochs):
            self._state, metrics = self.step(self._state, batch)
        names = ("value_loss", "value_clip_fraction", "grad_norm")
        found = {name if name.startswith("value") else f"critic_{name}": float(metrics[name]) for name in names}
        unexplained, spread = np.var(returns[mask] - values[mask]), np.var(returns[mask])
        explained = {"explained_variance": float(1 - unexplained / spread)} if spread > 0 else {}
        return {**found, **explained, "value_mean": float(values[mask].mean())}

    def _count(self, headers: Sequence[GroupHeader]) -> int:
        return padded(sum(len(header.rollouts) for header in headers), self._row_multiple)

    def _rows(self, headers: Sequence[GroupHeader], contents: Contents) -> tuple[dict[str, np.ndarray], list[Any]]:
        """Return this process's rows, and number, prompt and rollout of those that hold one."""
        total = self._count(headers)
        places = [(g, n) for g, header in enumerate(headers) for n in range(len(header.rollouts))]
        held = [row for row in local_rows(total) if row < len(places)]
        own = [(row, (contents[places[row][0]][0], contents[places[row][0]][1][places[row][1]])) for row in held]
        rows = fill_rows([(prompt, r.tokens) for _, (prompt, r) in own], len(local_rows(total)), self._length)
        sizes = np.zeros(len(rows["tokens"]), np.int32)
        sizes[: len(own)] = [len(prompt) + len(r.tokens) for _, (prompt, r) in own]
        at = np.broadcast_to(np.arange(self._length, dtype=np.int32), rows["tokens"].shape)
        inside = at < sizes[:, None]
        return {
            "tokens": rows["tokens"],
            "positions": np.where(inside, at, 0).astype(np.int32),
            "segment_ids": inside.astype(np.int32),
        }, own


def value_loss(
    values: jax.Array, returns: jax.Array, before: jax.Array, weights: jax.Array, *, clip: float | None
) -> tuple[jax.Array, Metrics]:
    """Return half the weighted squared error, and metrics; float32 arrays [batch, length].

    Args:
        values: values of the critic.
        returns: its targets.
        before: the values before the update.
        weights: weights of tokens, which sum to 1 over the batch.
        clip: how far values may go from `before` before their gradient ends; None: any way.
    """
    errors, clipped = jnp.square(values - returns), jnp.zeros_like(values)
    if clip is not None:
        near = jnp.square(before + jnp.clip(values - before, -clip, clip) - returns)
        errors, clipped = jnp.maximum(errors, near), (near > errors).astype(jnp.float32)
    loss = 0.5 * jnp.sum(errors * weights)
    return loss, {"value_loss": loss, "value_clip_fraction": jnp.sum(clipped * weights)}


def _values(model: Any, rows: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Return float32 values [rows, length] of the states after each token, and the layers' auxiliary outputs."""
    context = PackedContext(rows["positions"], rows["segment_ids"])
    require_complete_rows(context)
    hidden = model.hidden(rows["tokens"], context)
    return one_score(model.scores(hidden.x, context), "Critic"), hidden.aux
