"""Common parts of critics: values of whole rollouts, a row each, figures about them, and the loss of values."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from axlearn_like.config import Configurable
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Params
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.contexts.sharded_rows import row_order
from axlearn_like.training.losses import Metrics
from axlearn_like.training.step import State
from mesh import shard_batch
from mesh.batches import local_rows
from mesh.rules import constrain, partition
from rl.protocol.headers import GroupHeader
from rl.protocol.messages import RolloutData
from rl.training.batching import PaddedRows
from rl.training.logprobs import fill_rows, padded, row_length


class RolloutValues(Configurable, abc.ABC):
    """Base of critics: V of the state in which each token was drawn."""

    score: Any  # jitted (what `reads` returns, rows) -> float32 [rows, length], the values after each token
    separate: bool = True  # True if `update` makes updates of its own; else the values are learned in the policy's

    def __init__(self, sizes: PaddedRows):
        self._length, self._sizes = row_length(sizes.max_prompt_tokens, sizes.max_new_tokens), sizes

    @abc.abstractmethod
    def reads(self, state: State) -> Any:
        """Return the first argument of `score`, given the policy's train state."""

    def describe_reads(self, state: State) -> Any:
        """Return the same in abstract arrays, given the described state."""
        return self.reads(state)

    def start(self, policy: Params) -> None:
        """Begin with version 0 of the policy."""

    def updated(self, step: int, policy: Params) -> None:
        """Follow an update of the policy."""

    def describe(self) -> dict[str, Any]:
        """Return the abstract arrays of `saved`."""
        return {}

    def saved(self) -> dict[str, Any]:
        """Return arrays for a checkpoint, by their keys in it, that are not in the policy's train state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `saved` returned, out of the state of a checkpoint."""

    def describe_rows(self, rollouts: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of `score` for so many rollouts, sharded as `shard_batch` does."""
        sharding = NamedSharding(jax.sharding.get_mesh(), partition("batch", None) or jax.P())
        shape = padded(rollouts, self._sizes.row_multiple), self._length
        names = ("tokens", "positions", "segment_ids")
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in names}

    def rows(self, headers: Sequence[GroupHeader]) -> list[tuple[int, int]]:
        """Return group and rollout of each of the rows that this process fills."""
        rollouts = [(g, n) for g, header in enumerate(headers) for n in range(len(header.rollouts))]
        return [rollouts[row] for row in local_rows(self._count(headers)) if row < len(rollouts)]

    def values(self, headers: Sequence[GroupHeader], contents: RolloutData, state: State) -> np.ndarray:
        """Return V before each token of every rollout, float64 [rollouts, max_new_tokens], zero behind them.

        Each process fills its own rows, of which it has the contents; the values of all come to every process.
        """
        rows, _ = self._rows(headers, contents)
        arrays = shard_batch(rows, rows=self._count(headers), by_length=False)
        scored = np.asarray(self.score(self.reads(state), arrays))
        rollouts = [(header.prompt_length - 1, r.length) for header in headers for r in header.rollouts]
        found = np.zeros((len(rollouts), self._sizes.max_new_tokens))
        for number, (at, size) in enumerate(rollouts):
            found[number, :size] = scored[number, at : at + size]
        return found

    def update(
        self,
        headers: Sequence[GroupHeader],
        contents: RolloutData,
        values: np.ndarray,
        returns: np.ndarray,
        mask: np.ndarray,
    ) -> dict[str, float]:
        """Update by a batch, of which something is live, where critics do so by themselves; return metrics.

        Args:
            contents: as of `values`.
            values: as of `values`.
            returns: targets, [rollouts, max_new_tokens].
            mask: bool, tokens that count.
        """
        unexplained, spread = np.var(returns[mask] - values[mask]), np.var(returns[mask])
        explained = {"explained_variance": float(1 - unexplained / spread)} if spread > 0 else {}
        return {**explained, "value_mean": float(values[mask].mean())}

    def _count(self, headers: Sequence[GroupHeader]) -> int:
        return padded(sum(len(header.rollouts) for header in headers), self._sizes.row_multiple)

    def _rows(self, headers: Sequence[GroupHeader], contents: RolloutData) -> tuple[dict[str, np.ndarray], list[Any]]:
        """Return this process's rows, and number, prompt and rollout of those that hold one."""
        local, places = local_rows(self._count(headers)), self.rows(headers)
        # Rollouts come first; what is left are empty rows.
        own = [(int(row), (contents[g][0], contents[g][1][n])) for row, (g, n) in zip(local, places, strict=False)]
        rows = fill_rows([(prompt, r.tokens) for _, (prompt, r) in own], len(local), self._length)
        sizes = np.zeros(len(rows["tokens"]), np.int32)
        sizes[: len(own)] = [len(prompt) + len(r.tokens) for _, (prompt, r) in own]
        at = np.broadcast_to(np.arange(self._length, dtype=np.int32), rows["tokens"].shape)
        inside = at < sizes[:, None]
        return {
            "tokens": rows["tokens"],
            "positions": np.where(inside, at, 0).astype(np.int32),
            "segment_ids": inside.astype(np.int32),
        }, own


def values_of_rows(
    model: Any, rows: Mapping[str, jax.Array], read: Callable[[jax.Array, PackedContext], jax.Array]
) -> tuple[jax.Array, Aux]:
    """Return values [rows, length] after each token, float32, by `read` of hidden states, and auxiliary outputs."""
    order = row_order(rows["tokens"].shape[1])
    if order is not None:
        rows = {name: order.split(rows[name]) for name in ("tokens", "positions", "segment_ids")}
    context = PackedContext(rows["positions"], rows["segment_ids"], "straight" if order is None else "zigzag")
    hidden = model.hidden(rows["tokens"], context)
    values = read(constrain(hidden.x, "batch", "length", None), context)
    return values if order is None else order.join(values), hidden.aux


def value_loss(values: jax.Array, batch: Mapping[str, jax.Array], *, clip: float | None) -> tuple[jax.Array, Metrics]:
    """Return half the weighted squared error, and metrics.

    Args:
        values: values of the critic, float32 [..., T].
        batch: "returns", the targets; "values", those before the update; "weights" of tokens, which sum to 1 over the
            batch; all float32 [..., T].
        clip: how far values may go from those before the update until their gradient ends; None: any way.
    """
    returns, before, weights = batch["returns"], batch["values"], batch["weights"]
    values = jnp.where(weights > 0, values, returns)  # a product with weights would not do: padding may be NaN
    errors, clipped = jnp.square(values - returns), jnp.zeros_like(values)
    if clip is not None:
        near = jnp.square(before + jnp.clip(values - before, -clip, clip) - returns)
        errors, clipped = jnp.maximum(errors, near), (near > errors).astype(jnp.float32)
    loss = 0.5 * jnp.sum(errors * weights)
    return loss, {"value_loss": loss, "value_clip_fraction": jnp.sum(clipped * weights)}
