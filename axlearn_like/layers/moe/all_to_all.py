"""All-to-all of rows to the devices that hold their experts, and back, over one mesh axis; inside a shard_map.

TPUs send exactly the rows there are, by a ragged all-to-all. Where XLA has none (CPUs), and on GPUs, blocks of a fixed
size are sent, padded with zeros. Both put the same rows in the same places, so no other code depends on which was
used: a receiver has one block of `capacity` rows for each sender, filled from its start.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh.manual import vary, varying


class SendPlan(NamedTuple):
    """How many rows each device sends to each.

    Attributes:
        starts: int32 [devices], where in this device's rows those for each device begin.
        sent: int32 [devices], how many of them are sent there, at most the capacity.
        received: int32 [devices], how many come from each.
    """

    starts: jax.Array
    sent: jax.Array
    received: jax.Array


def plan_sends(sizes: jax.Array, capacity: int, axis: str) -> SendPlan:
    """Return the plan for rows sorted by destination, of which sizes[i] go to device i; int32 [devices]."""
    sent = jnp.minimum(sizes, capacity)
    return SendPlan(jnp.cumsum(sizes) - sizes, sent, jax.lax.all_to_all(sent, axis, 0, 0, tiled=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def to_experts(x: jax.Array, plan: SendPlan, capacity: int, axis: str) -> jax.Array:
    """Return [devices * capacity, dim] for [rows, dim]: zeros in empty places; rows beyond the capacity stay."""
    return jax.lax.platform_dependent(
        x,
        plan,
        tpu=functools.partial(_ragged_dispatch, capacity=capacity, axis=axis),
        default=functools.partial(padded_dispatch, capacity=capacity, axis=axis),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def from_experts(y: jax.Array, plan: SendPlan, rows: int, axis: str) -> jax.Array:
    """Return the inverse, [rows, dim] for [devices * capacity, dim]; zeros for rows that were not sent."""
    return jax.lax.platform_dependent(
        y,
        plan,
        tpu=functools.partial(_ragged_combine, rows=rows, axis=axis),
        default=functools.partial(padded_combine, rows=rows, axis=axis),
    )


class Slices(NamedTuple):
    """The arguments of a ragged all-to-all, int32 [devices] each, as in `jax.lax.ragged_all_to_all`.

    Attributes:
        input_offsets: where the rows for each device begin here.
        send_sizes: how many are sent there.
        output_offsets: where they are put there.
        recv_sizes: how many come from each.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def dispatch_slices(plan: SendPlan, capacity: int, axis: str) -> Slices:
    """Return the slices of the way to the experts: into this device's block of every receiver."""
    mine = jnp.full_like(plan.sent, jax.lax.axis_index(axis) * capacity)
    return Slices(plan.starts, plan.sent, mine, plan.received)


def combine_slices(plan: SendPlan, capacity: int, axis: str) -> Slices:
    """Return the slices of the way back: out of each sender's block, to where its rows were."""
    blocks = vary(jnp.arange(len(plan.sent), dtype=jnp.int32) * capacity, varying(plan.sent))
    return Slices(blocks, plan.received, jax.lax.all_to_all(plan.starts, axis, 0, 0, tiled=True), plan.sent)


def _ragged_dispatch(x: jax.Array, plan: SendPlan, *, capacity: int, axis: str) -> jax.Array:
    out = vary(jnp.zeros_like(x, shape=(len(plan.sent) * capacity, x.shape[1])), varying(x))
    return jax.lax.ragged_all_to_all(x, out, *dispatch_slices(plan, capacity, axis), axis_name=axis)


def _ragged_combine(y: jax.Array, plan: SendPlan, *, rows: int, axis: str) -> jax.Array:
    out = vary(jnp.zeros_like(y, shape=(rows, y.shape[1])), varying(y))
    return jax.lax.ragged_all_to_all(y, out, *combine_slices(plan, len(y) // len(plan.sent), axis), axis_name=axis)


def padded_dispatch(x: jax.Array, plan: SendPlan, *, capacity: int, axis: str) -> jax.Array:
    """Return `to_experts` by an all-to-all of whole blocks."""
    place = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.minimum(plan.starts[:, None] + place, len(x) - 1)
    blocks = jnp.where((place < plan.sent[:, None])[..., None], x[row], 0)
    return jax.lax.all_to_all(blocks, axis, 0, 0, tiled=True).reshape(-1, x.shape[1])


def padded_combine(y: jax.Array, plan: SendPlan, *, rows: int, axis: str) -> jax.Array:
    """Return `from_experts` by an all-to-all of whole blocks."""
    devices = len(plan.sent)
    capacity = len(y) // devices
    blocks = jax.lax.all_to_all(y.reshape(devices, capacity, -1), axis, 0, 0, tiled=True)
    row = jnp.arange(rows, dtype=jnp.int32)
    device = jnp.searchsorted(plan.starts, row, side="right").astype(jnp.int32) - 1
    place = row - plan.starts[device]
    found = blocks.reshape(devices * capacity, -1)[device * capacity + jnp.minimum(place, capacity - 1)]
    return jnp.where((place < plan.sent[device])[:, None], found, 0)


def _dispatch_forward(x: jax.Array, plan: SendPlan, capacity: int, axis: str) -> tuple[jax.Array, Any]:
    return to_experts(x, plan, capacity, axis), (plan, x[:, :0])  # only the number of rows of x


def _dispatch_backward(capacity: int, axis: str, kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    plan, like = kept
    return from_experts(g, plan, len(like), axis), None


def _combine_forward(y: jax.Array, plan: SendPlan, rows: int, axis: str) -> tuple[jax.Array, Any]:
    return from_experts(y, plan, rows, axis), (plan, y[:, :0])


def _combine_backward(rows: int, axis: str, kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    plan, like = kept
    return to_experts(g, plan, len(like) // len(plan.sent), axis), None


to_experts.defvjp(_dispatch_forward, _dispatch_backward)
from_experts.defvjp(_combine_forward, _combine_backward)
