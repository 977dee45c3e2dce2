"""Cross entropy of next-token targets, in the additive form that gradient accumulation needs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.kernels.attention.context_parallel.zigzag import reorder
from axlearn_like.kernels.deterministic import exponentials, no_fuse
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import bind, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.training.heads.chunked_head import TokenLoss, fused_linear_loss, map_chunks
from mesh.sharding import shard_like, token_axes

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
LossFn = Callable[[Any, Batch], tuple[jax.Array, Metrics]]
Loss = LossFn  # function of a model and a batch, as `SupervisedLoss`; a LossFn takes parameters


def token_logprobs(logits_btv: jax.Array, targets_bt: jax.Array) -> jax.Array:
    """Log softmax(logits)[target], float32 [batch, length], whatever the dtype of the logits.

    The target's logit is picked by comparison and sum instead of a gather: XLA fuses it, and it
    also holds where the vocabulary is spread over the mesh (a gather along a sharded axis would
    first collect the logits).
    """
    logits = logits_btv.astype(jnp.float32)
    return _picked(logits, targets_bt) - jax.nn.logsumexp(logits, axis=-1)


def token_hits(logits_btv: jax.Array, targets_bt: jax.Array) -> jax.Array:
    """Return whether each target has the largest logit, the first of equals; bool [batch, length].

    By comparison with the target's logit, not by argmax: that takes XLA's CPU code twenty times as long, and along an
    axis that is spread over the mesh the logits would first be collected. Never where a logit is NaN.
    """
    logits, words = logits_btv.astype(jnp.float32), jnp.arange(logits_btv.shape[-1], dtype=targets_bt.dtype)
    picked, targets = _picked(logits, targets_bt)[..., None], targets_bt[..., None]
    return jnp.all((logits < picked) | ((logits == picked) & (words >= targets)), axis=-1)


def _picked(logits: jax.Array, targets_bt: jax.Array) -> jax.Array:
    is_target = targets_bt[..., None] == jnp.arange(logits.shape[-1], dtype=targets_bt.dtype)
    return jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)


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
    """Return the parts of the targets' log-probabilities, the same to the bit in every batch.

    Used to sample and to score; unlike `token_logprobs` it stores the softmax, and has no gradient.
    """
    logits = logits_btv.astype(jnp.float32)
    is_target = targets_bt[..., None] == jnp.arange(logits.shape[-1], dtype=targets_bt.dtype)
    logit = jnp.max(jnp.where(is_target, logits, -jnp.inf), axis=-1)
    _, total = exponentials(logits, "vocab")
    return Chosen(logit, no_fuse(jnp.max(logits, axis=-1)), total[..., 0])


class PackedLoss(Configurable):
    """Base of losses of a decoder on the packed batches of an input."""

    class Config(ConfigBase["PackedLoss"]):
        @property
        def contents(self) -> str:
            """Kind of examples that its input has (see `SupervisedInput.Config`)."""
            return "texts"

        @property
        def scores(self) -> Mapping[str, Any]:
            """Arrays that scoring adds to a batch, `ScoredArray`s (see `alignment.scoring`)."""
            return {}

    def __init__(self, cfg: Any):
        self.cfg = cfg

    def __call__(self, model: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return loss and metrics of a decoder on a batch, additive over slices."""
        raise NotImplementedError


class SupervisedLoss(PackedLoss):
    """Weighted cross entropy of next tokens, the layers' own losses, and metrics, all additive over slices."""

    class Config(PackedLoss.Config):
        chunks: int = 1  # parts into which a row's tokens are cut for the head; logits of one part exist at a time
        z_loss: float = 0.0  # weight of logsumexp(logits)^2 (PaLM, arXiv 2204.02311, 5)

        @override
        def check_fields(self) -> None:
            self.require_least(1, "chunks")
            self.require_least(0, "z_loss")

    def __call__(self, model: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Loss and metrics of a decoder on a packed batch of `SupervisedInput`.

        The batch's `weights`, float32 [batch, length], are 1 / (number of target tokens in the *global* batch) on
        target tokens and 0 elsewhere, so that the sum over any split into microbatches is the mean over the global
        batch. A layer's own loss, a mean over the tokens of a slice, counts by the slice's share of that weight.
        """
        batch, layout = reorder(batch)
        context = PackedContext(batch["positions"], batch["segment_ids"], layout)
        hidden = model.hidden(batch["tokens"], context)

        targets, weights = (shard_like(batch[name], hidden.x) for name in ("targets", "weights"))

        def of_logits(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, Metrics]:
            return supervised_loss(logits, {"targets": targets, "weights": weights}, z_loss=self.cfg.z_loss)

        loss, metrics = head_sums(model, of_logits, self.cfg.chunks, hidden.x, targets, weights)
        return with_aux(loss, metrics, hidden.aux, jnp.sum(batch["weights"]))


def head_sums(model: Any, fn: TokenLoss, chunks: int, x: jax.Array, *others: jax.Array) -> tuple[jax.Array, Metrics]:
    """Return the sums over tokens of `fn(logits, *others)`, a loss and metrics; logits of one chunk exist at a time.

    Args:
        fn: returns sums over tokens.
        chunks: parts of a row's tokens.
        x: final hidden states [batch, length, dim].
        others: [batch, length, ...], sharded as x is.
    """
    graphdef, params = split(model.output)

    def one(params: Any, x: jax.Array, *others: jax.Array) -> tuple[jax.Array, Metrics]:
        return fn(bind(graphdef, params).logits(x), *others)

    if axes := token_axes(x):
        x = model.output.factors(x)  # dtype of the gathered head
        return fused_linear_loss(one, chunks, axes, params, x, *others)
    sums = map_chunks(partial(one, params), chunks, x, *others)
    return jax.tree.map(lambda values: jnp.sum(values, axis=0, dtype=values.dtype), sums)


def supervised_loss(logits_btv: jax.Array, batch: Batch, *, z_loss: float = 0.0) -> tuple[jax.Array, Metrics]:
    """Weighted cross entropy and its metrics, from logits.

    Args:
        logits_btv: [batch, length, vocab].
        batch: `targets` int32 [batch, length] and `weights` float32 [batch, length] (see `SupervisedLoss`).
        z_loss: weight of the squared logsumexp.

    Returns:
        The loss, and the metrics `loss` (cross entropy alone), `accuracy` (fractions of the global batch), `tokens` (a
        count) and, where it has a weight, `z_loss`.
    """
    weights = batch["weights"]
    loss = -jnp.sum(token_logprobs(logits_btv, batch["targets"]) * weights)
    hits = token_hits(logits_btv, batch["targets"])
    metrics = {
        "loss": loss,
        "accuracy": jnp.sum(jnp.where(hits, weights, 0.0)),
        "tokens": jnp.sum(weights > 0, dtype=jnp.int32),
    }
    if z_loss:
        peak = jax.nn.logsumexp(logits_btv.astype(jnp.float32), axis=-1)
        metrics["z_loss"] = z_loss * jnp.sum(peak * peak * weights)
        loss = loss + metrics["z_loss"]
    return loss, metrics


def with_aux(loss: jax.Array, metrics: Metrics, aux: Aux, share: jax.Array | float) -> tuple[jax.Array, Metrics]:
    """Loss and metrics with what the layers add, where the slice is this share of the global batch."""
    losses = {name: value * share for name, value in aux.losses.items()}
    others = {name: value if name.endswith("_max") else value * share for name, value in aux.metrics.items()}
    return sum(losses.values(), loss), {**metrics, **losses, **others}


def make_supervised_loss(graphdef: nnx.GraphDef[Any], loss: Loss | None = None) -> LossFn:
    """Return `loss_fn(params, batch)` of a decoder on the packed batches of its input."""
    loss = loss or SupervisedLoss.Config().build()
    return lambda params, batch: loss(bind(graphdef, params), batch)


def eval_step(graphdef: nnx.GraphDef[Any], loss: Loss) -> LossFn:
    """Return the jitted `(params, batch) -> (loss, metrics)` of an evaluation by the trainer's loss."""
    return jax.jit(make_supervised_loss(graphdef, loss))
