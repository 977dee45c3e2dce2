"""Programs of training slots: rows of a batch, each with the adapter of its slot and a gradient of its own.

The factors of a row's slot are gathered, the gradient is taken with respect to what was gathered, and each row's is
then added to its slot's sum, one row after another. So no sum goes over rows of two slots, and the shape of a program
depends on nothing but the length of its rows. On CPUs in float32 a row then has the same bits wherever in the batch it
stands; with another number of rows it would not: XLA chooses the order of the backward pass's sums by that.

Base matrices are constants: their gradient is never computed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.kernels.deterministic import each, no_fuse, row_sum
from axlearn_like.kernels.exact.scope import use_numerics
from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.wrappers.adapters import Factors
from axlearn_like.layers.wrappers.low_rank.matrices import RowAdapted
from axlearn_like.training.heads.chunked_head import map_chunks, merge_length
from axlearn_like.training.losses import Chosen
from mesh.programs.shared import shared_program
from rl.serving.service.losses import target_losses, token_losses
from rl.serving.service.messages import AdamParams

LOGITS_AT_ONCE = 1 << 25  # logits that exist at a time; rows are cut into chunks of tokens


class SlotArrays(NamedTuple):
    """Arrays of all slots: nested dicts with `Factors` [layers, slots, ...]; slot 0 is no model's, for empty rows."""

    factors: Any  # the adapters, without their scales
    gradients: Any  # sums since the last step
    first: Any  # means of gradients (Adam)
    second: Any  # means of squared gradients


class RowBatch(NamedTuple):
    """Rows of one program: arrays [rows, length], and [rows]."""

    tokens: Any  # int32
    targets: Any  # int32, [rows, length, targets] if a token has several
    live: Any  # bool, False behind the end of a row
    arrays: dict[str, Any]  # float32 inputs of the losses, by name, in the shape of the targets
    slots: Any  # int32 [rows]; 0: an empty row
    kinds: Any  # int32 [rows], the number of the row's loss
    scales: Any  # float32 [rows], that of the adapter's product


class RowResults(NamedTuple):
    """Results of rows: parts of the targets' log-probabilities, and the sums of their losses [rows]."""

    chosen: Chosen
    losses: Any


class RowPrograms(NamedTuple):
    """Jitted functions; arrays of slots that a function changes are donated to it."""

    forward_backward: Any  # (params, factors, gradients, batch) -> gradients, results
    forward: Any  # (params, factors, batch) -> results
    step: Any  # (arrays, slot, settings) -> arrays, norm of the gradient; see `optimizer_step`
    write: Any  # (arrays, arrays of one slot, slot) -> arrays
    read: Any  # (arrays, slot) -> arrays of one slot


def row_programs(graphdef: nnx.GraphDef[Any]) -> RowPrograms:
    """Return the programs of a plain decoder."""

    def forward(params: Params, factors: Any, batch: RowBatch) -> RowResults:
        return _losses(gathered(factors, batch.slots), params, graphdef, batch)[1]

    def forward_backward(params: Params, factors: Any, gradients: Any, batch: RowBatch) -> tuple[Any, RowResults]:
        own = gathered(factors, batch.slots)
        gradient, results = jax.grad(_losses, has_aux=True)(own, params, graphdef, batch)
        return added(gradients, gradient, batch.slots), results

    def make() -> RowPrograms:
        return RowPrograms(
            jax.jit(forward_backward, donate_argnums=2),
            jax.jit(forward),
            jax.jit(optimizer_step, donate_argnums=0),
            jax.jit(written, donate_argnums=0),
            jax.jit(of_slot),
        )

    return shared_program(("rows of slots", graphdef), make)


def gathered(factors: Any, slots: jax.Array) -> Any:
    """Return the factors of each row's slot, [layers, rows, ...]."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=1, mode="clip"), factors)


def added(sums: Any, rows: Any, slots: jax.Array) -> Any:
    """Return the slots' sums with each row's gradient added to that of its slot, in order."""

    def one(row: jax.Array, sums: Any) -> Any:
        slot = slots[row]

        def leaf(total: jax.Array, gradient: jax.Array) -> jax.Array:
            own = jax.lax.dynamic_index_in_dim(total, slot, 1)
            new = own + jax.lax.dynamic_index_in_dim(gradient, row, 1)
            return jax.lax.dynamic_update_slice_in_dim(total, new, slot, 1)

        return jax.tree.map(leaf, sums, rows)

    return jax.lax.fori_loop(0, len(slots), one, sums)


def of_slot(arrays: Any, slot: jax.Array) -> Any:
    """Return the arrays of one slot."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, slot, 1, keepdims=False), arrays)


def written(arrays: Any, one: Any, slot: jax.Array) -> Any:
    """Return the arrays with those of one slot replaced."""

    def leaf(held: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(held, new.astype(held.dtype), slot, 1)

    return jax.tree.map(leaf, arrays, one)


def optimizer_step(arrays: SlotArrays, slot: jax.Array, new: dict[str, jax.Array]) -> tuple[SlotArrays, jax.Array]:
    """Return the arrays after a step of AdamW of a slot, and the norm of its gradient, which is zero after it.

    A slot whose gradient's norm is no number keeps its weights and moments.

    Args:
        arrays: arrays of all slots.
        slot: int32.
        new: float32 numbers of the step, see `settings_of`.
    """
    # Behind a barrier: fused with what reads a slot, the write would need a copy of the arrays of all slots.
    own = jax.lax.optimization_barrier(of_slot(arrays, slot))
    squares = [jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(own.gradients)]
    norm = jnp.sqrt(sum(squares[1:], squares[0]))
    fine, limit = jnp.isfinite(norm), new["clip"]
    clip = jnp.where((limit > 0) & (norm > limit), limit / norm, 1.0)

    def leaf(weight: jax.Array, gradient: jax.Array, first: jax.Array, second: jax.Array) -> Any:
        gradient = gradient * clip
        m = new["beta1"] * first + new["rest1"] * gradient
        v = new["beta2"] * second + new["rest2"] * (gradient * gradient)
        step = (m / new["unbiased1"]) / (jnp.sqrt(v / new["unbiased2"]) + new["eps"]) + new["decay"] * weight
        moved = (weight - new["rate"] * step, jnp.zeros_like(gradient), m, v)
        kept = (weight, jnp.zeros_like(gradient), first, second)
        return tuple(jnp.where(fine, *both) for both in zip(moved, kept, strict=True))

    trees = jax.tree.transpose(jax.tree.structure(own.factors), None, jax.tree.map(leaf, *own))
    return written(arrays, jax.lax.optimization_barrier(SlotArrays(*trees)), slot), norm


def _losses(own: Any, params: Params, graphdef: nnx.GraphDef[Any], batch: RowBatch) -> tuple[jax.Array, RowResults]:
    """Return the sum of all rows' losses, of which the gradient is taken, and the results."""
    model = bind(graphdef, _attached(params, own, batch.scales))
    rows, length = batch.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    chunks = 1
    while rows * length * model.vocab_size > chunks * LOGITS_AT_ONCE and length % (2 * chunks) == 0:
        chunks *= 2
    with use_numerics(model.numerics):
        hidden = model.hidden(batch.tokens, RowContext(positions, batch.live)).x

        def of_targets(x: jax.Array, targets: jax.Array) -> tuple[jax.Array, Chosen]:
            return _chosen(model.logits(x), targets)

        found = map_chunks(of_targets, chunks, hidden, batch.targets)
    logprobs, chosen = jax.tree.map(merge_length, found)
    if logprobs.ndim == 3:
        tokens = target_losses(logprobs, batch.arrays["weights"], batch.live)
    else:
        tokens = token_losses(batch.kinds, logprobs, batch.arrays, batch.live)
    losses = jnp.sum(tokens, axis=-1)
    return jnp.sum(losses), RowResults(chosen, losses)


def _chosen(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Chosen]:
    """Return log-probabilities of targets, with a gradient, and their parts in the order of `chosen_tokens`."""
    logits = logits.astype(jnp.float32)
    peak = jax.lax.stop_gradient(no_fuse(jnp.max(logits, axis=-1, keepdims=True)))
    behind = logits - peak
    total = row_sum(each(jnp.exp, behind), "vocab")[..., 0]
    if targets.ndim == logits.ndim:  # several a token
        logit, total = jnp.take_along_axis(logits, targets, axis=-1), total[..., None]
        return logit - peak - jnp.log(total), Chosen(logit, peak, total)
    is_target = targets[..., None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)
    logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return logit - peak[..., 0] - jnp.log(total), Chosen(logit, peak[..., 0], total)


def _attached(params: Params, own: Any, scales: jax.Array) -> Params:
    """Return parameters in which every row's matrices have the product of its factors, times its scale."""

    def of(weight: Any, part: Any) -> Any:
        if isinstance(part, Factors):
            return RowAdapted(weight, part.a, part.b * scales[:, None, None])
        return {**weight, **{key: of(weight[key], value) for key, value in part.items()}}

    return of(params, own)


def settings_of(adam: AdamParams, step: int) -> dict[str, np.float32]:
    """Return the numbers of step `step`, from 1: rest1 = 1 - beta1, unbiased1 = 1 - beta1^step."""
    numbers = {"rate": adam.learning_rate, "eps": adam.eps, "decay": adam.weight_decay, "clip": adam.grad_clip_norm}
    for which, beta in (("1", adam.beta1), ("2", adam.beta2)):
        numbers |= {f"beta{which}": beta, f"rest{which}": 1 - beta, f"unbiased{which}": 1 - beta**step}
    return {name: np.float32(value) for name, value in numbers.items()}
