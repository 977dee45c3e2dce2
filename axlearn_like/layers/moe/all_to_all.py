"""All-to-all of rows to the devices that hold their experts, and back, over one mesh axis; inside a shard_map.

Where experts have replicas, "experts" here are slots (`axlearn_like.layers.moe.replicas`).

A receiver's rows are ordered by expert, those of one expert by sender: they are sent straight to their places, and a
grouped product takes them as they come. It takes them in rounds of `capacity` rows: a round is a window of that
order, so every row is in exactly one round, however unevenly experts are chosen.

TPUs send exactly the rows there are, by a ragged all-to-all. Where XLA has none (CPUs), and on GPUs, every device
gathers all rows and takes its own. Both put the same rows in the same places.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh.sharding import vary, varying


class SendPlan(NamedTuple):
    """One round's slices of rows, as this device sees them.

    The first four have an entry for each expert of all devices, int32 [experts]; `received` and `blocks` one for each
    sender and each expert of this device, int32 [devices * own experts].
    """

    starts: jax.Array  # first of this device's sorted rows for each expert
    sent: jax.Array  # number of them that are sent in this round
    places: jax.Array  # place of the first on its receiver
    received: jax.Array  # number of rows that come
    blocks: jax.Array  # place of the first here
    sizes: jax.Array  # rows of each of this device's experts in this round, int32 [own experts]


def plan_round(
    sizes: jax.Array, turn: jax.Array | int, capacity: int, axis: str, starts: jax.Array | None = None
) -> SendPlan:
    """Return the plan of a round.

    Args:
        sizes: int32 [devices, experts], the rows of each device for each expert; rows are sorted by expert.
        turn: number of the round: every device receives rows turn * capacity to (turn + 1) * capacity of its order.
        capacity: the most rows that a device receives in a round.
        axis: mesh axis over which the experts are sharded.
        starts: int32 [devices, experts], where those rows begin on their device; None: one after another.
    """
    devices, experts = sizes.shape
    by_sender = sizes.reshape(devices, devices, experts // devices)  # sender, receiver, expert
    ordered = by_sender.transpose(1, 2, 0)  # the receivers' order
    flat = ordered.reshape(devices, -1)
    first = (jnp.cumsum(flat, axis=1) - flat).reshape(ordered.shape).transpose(2, 0, 1)
    starts = jnp.cumsum(sizes, axis=1) - sizes if starts is None else starts
    at_sender = starts.reshape(by_sender.shape)
    low = turn * capacity
    begin, end = (jnp.clip(x, low, low + capacity) for x in (first, first + by_sender))
    rows, sent, places = at_sender + begin - first, end - begin, begin - low
    me = jax.lax.axis_index(axis)
    here, blocks = (jax.lax.dynamic_index_in_dim(x, me, 1, keepdims=False) for x in (sent, places))
    rows, sent, places = (jax.lax.dynamic_index_in_dim(x, me, 0).reshape(-1) for x in (rows, sent, places))
    return SendPlan(rows, sent, places, here.reshape(-1), blocks.reshape(-1), jnp.sum(here, axis=0))


def count_rounds(sizes: jax.Array, capacity: int) -> jax.Array:
    """Return how many rounds the busiest device needs, at least 1: int32 []. `sizes`: see `plan_round`."""
    devices = len(sizes)
    received = jnp.sum(sizes.reshape(devices, devices, -1), axis=(0, 2))
    return jnp.maximum(1, -(-jnp.max(received) // capacity))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def to_experts(x: jax.Array, plan: SendPlan, capacity: int, axis: str) -> jax.Array:
    """Return [capacity, dim] for [rows, dim]: this round's rows in the receiver's order, then zeros."""
    return jax.lax.platform_dependent(
        x,
        plan,
        tpu=functools.partial(_ragged_dispatch, capacity=capacity, axis=axis),
        default=functools.partial(gathered_dispatch, capacity=capacity, axis=axis),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def from_experts(y: jax.Array, into: jax.Array, plan: SendPlan, axis: str) -> jax.Array:
    """Return `into`, [rows, dim], with this round's rows replaced by those that come back: y is [capacity, dim]."""
    return jax.lax.platform_dependent(
        y,
        into,
        plan,
        tpu=functools.partial(_ragged_combine, axis=axis),
        default=functools.partial(gathered_combine, axis=axis),
    )


def _ragged_dispatch(x: jax.Array, plan: SendPlan, *, capacity: int, axis: str) -> jax.Array:
    out = vary(jnp.zeros_like(x, shape=(capacity, x.shape[1])), varying(x))
    slices = (plan.starts, plan.sent, plan.places, plan.received)
    return jax.lax.ragged_all_to_all(x, out, *slices, axis_name=axis)


def _ragged_combine(y: jax.Array, into: jax.Array, plan: SendPlan, *, axis: str) -> jax.Array:
    home = jax.lax.all_to_all(plan.starts, axis, 0, 0, tiled=True)
    return jax.lax.ragged_all_to_all(y, into, plan.blocks, plan.received, home, plan.sent, axis_name=axis)


def gathered_dispatch(x: jax.Array, plan: SendPlan, *, capacity: int, axis: str) -> jax.Array:
    """Return `to_experts` by gathering all rows."""
    home = jax.lax.all_to_all(plan.starts, axis, 0, 0, tiled=True)
    devices = len(plan.received) // len(plan.sizes)
    # In the receiver's order: own experts, then senders.
    begin, count, source = (a.reshape(devices, -1).T.reshape(-1) for a in (plan.blocks, plan.received, home))
    index, found = _slice_of(jnp.arange(capacity, dtype=jnp.int32), begin, count)
    row = index % devices * len(x) + source[index]
    rows = jax.lax.all_gather(x, axis, tiled=True)
    offset = jnp.arange(capacity, dtype=jnp.int32) - begin[index]
    return jnp.where(found[:, None], rows[jnp.where(found, row + offset, 0)], 0)


def gathered_combine(y: jax.Array, into: jax.Array, plan: SendPlan, *, axis: str) -> jax.Array:
    """Return `from_experts` by gathering all results."""
    each = jnp.arange(len(into), dtype=jnp.int32)
    index, found = _slice_of(each, plan.starts, plan.sent)
    row = index // len(plan.sizes) * len(y) + plan.places[index] + each - plan.starts[index]
    rows = jax.lax.all_gather(y, axis, tiled=True)
    return jnp.where(found[:, None], rows[jnp.where(found, row, 0)], into)


def _slice_of(each: jax.Array, begin: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return for each place the number of its slice, of those that begin at `begin`, and if it is in one."""
    within = (each[:, None] >= begin) & (each[:, None] < begin + count)
    return jnp.argmax(within, axis=1).astype(jnp.int32), jnp.any(within, axis=1)


def _dispatch_backward(capacity: int, axis: str, kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    plan, like = kept
    nothing = vary(jnp.zeros_like(g, shape=(len(like), g.shape[1])), varying(g))
    return from_experts(g, nothing, plan, axis), None


def _combine_backward(axis: str, kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    plan, like = kept
    _, found = _slice_of(jnp.arange(len(g), dtype=jnp.int32), plan.starts, plan.sent)
    return to_experts(g, plan, len(like), axis), jnp.where(found[:, None], 0, g), None


# The backward pass keeps the number of rows, no values.
to_experts.defvjp(lambda x, plan, *sizes: (to_experts(x, plan, *sizes), (plan, x[:, :0])), _dispatch_backward)
from_experts.defvjp(
    lambda y, into, plan, axis: (from_experts(y, into, plan, axis), (plan, y[:, :0])), _combine_backward
)
