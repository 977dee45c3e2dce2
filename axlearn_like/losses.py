"""Cross entropy of next-token targets, in the additive form that gradient accumulation needs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.context import PackedContext
from axlearn_like.layers.reduction import apart, exponentials

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
LossFn = Callable[[Any, Batch], tuple[jax.Array, Metrics]]


def token_logprobs(logits_btv: jax.Array, targets_bt: jax.Array) -> jax.Array:
    """log softmax(logits)[target], float32 [batch, length], whatever the dtype of the logits.

    The target's logit is picked by comparison and sum instead of a gather: XLA fuses it, and it
    also holds where the vocabulary is spread over the mesh (a gather along a sharded axis would
    first collect the logits).
    """
    logits = logits_btv.astype(jnp.float32)
    is_target = targets_bt[..., None] == jnp.arange(logits.shape[-1], dtype=targets_bt.dtype)
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return picked - jax.nn.logsumexp(logits, axis=-1)


class Chosen(NamedTuple):
    """A token's log-probability in parts, float32 arrays of one shape."""

    logit: Any
    peak: Any  # the largest logit
    total: Any  # sum of exp(logit - peak)

    def logprobs(self) -> np.ndarray:
        """float32, put together on the host: XLA's CPU code rounds logarithms by where they stand in a program."""
        logit, peak, total = (np.asarray(part, np.float64) for part in self)
        with np.errstate(invalid="ignore"):
            return (logit - peak - np.log(total)).astype(np.float32)


def chosen_tokens(logits_btv: jax.Array, targets_bt: jax.Array) -> Chosen:
    """What the log-probabilities of the targets are made of, the same to the bit in every batch.

    For what is drawn and scored; unlike `token_logprobs` it stores the softmax, and has no gradient.
    """
    logits = logits_btv.astype(jnp.float32)
    is_target = targets_bt[..., None] == jnp.arange(logits.shape[-1], dtype=targets_bt.dtype)
    logit = jnp.max(jnp.where(is_target, logits, -jnp.inf), axis=-1)
    _, total = exponentials(logits)
    return Chosen(logit, apart(jnp.max(logits, axis=-1)), total[..., 0])


def supervised_loss(logits_btv: jax.Array, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Weighted cross entropy and its metrics, all additive over slices of the batch.

    Args:
        logits_btv: [batch, length, vocab].
        batch: `targets` int32 [batch, length] and `weights` float32 [batch, length]. The weights
            are 1 / (number of target tokens in the *global* batch) on target tokens and 0
            elsewhere, so the sum over any split into microbatches is the mean over the global
            batch.

    Returns:
        The loss, and the metrics `loss`, `accuracy` (fractions of the global batch) and `tokens` (a
        count).
    """
    weights = batch["weights"]
    loss = -jnp.sum(token_logprobs(logits_btv, batch["targets"]) * weights)
    hits = jnp.argmax(logits_btv, axis=-1).astype(batch["targets"].dtype) == batch["targets"]
    return loss, {
        "loss": loss,
        "accuracy": jnp.sum(jnp.where(hits, weights, 0.0)),
        "tokens": jnp.sum(weights > 0, dtype=jnp.int32),
    }


def make_supervised_loss(graphdef: nnx.GraphDef[Any]) -> LossFn:
    """`loss_fn(params, batch)` of a decoder on the packed batches of `SupervisedInput`."""

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        context = PackedContext(positions=batch["positions"], segment_ids=batch["segment_ids"])
        return supervised_loss(bind(graphdef, params)(batch["tokens"], context), batch)

    return loss_fn
