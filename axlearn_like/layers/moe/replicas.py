"""Replicas of experts in a layer: rows by a plan's table, weights of experts brought to the slots that it gives them.

Parameters and optimizer state stay where they are, sharded in the order of experts, so a checkpoint knows nothing of
replicas. In each pass a device receives the weights of its slots' experts, as it gathers shards over `fsdp`, and sends
gradients back, which their home adds up, one replica after the other in the order of slots: in fixed order. So another
plan costs no recompilation, and nothing has to be moved beforehand (as in fully sharded expert parallelism, LAER-MoE,
arXiv 2602.11686).
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.layers.moe.placement import WHOLE
from mesh.sharding import vary, varying


class Placement(NamedTuple):
    """The table of one layer, or with a first axis of all layers, on devices; see `ExpertPlan`."""

    experts: jax.Array  # int32 [slots]
    ends: jax.Array  # int32 [slots]


_PLACEMENT: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextlib.contextmanager
def placed(placement: Placement | None) -> Iterator[None]:
    """Let layers traced within compute experts by a table [layers, slots]; None: each on its home alone."""
    token = _PLACEMENT.set(placement)
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


def placed_layer(index: jax.Array | None) -> contextlib.AbstractContextManager[None]:
    """Give the layer of this index its row of the table; None: it has none."""
    placement = _PLACEMENT.get()
    return placed(None if placement is None or index is None else Placement(*(a[index] for a in placement)))


def current_placement() -> Placement | None:
    """Return the table of the layer that is being traced."""
    return _PLACEMENT.get()


def rows_by_slot(sizes: jax.Array, placement: Placement) -> tuple[jax.Array, jax.Array]:
    """Return the rows of each device for each slot, and where they begin among its rows: int32 [devices, slots].

    The rows of an expert are numbered device by device, and its slots take consecutive parts of them, as large as their
    shares say, to one row, on whatever devices the rows are.

    Args:
        sizes: int32 [devices, experts], the rows of each device for each expert; a device's rows are sorted by expert.
    """
    order = jnp.argsort(placement.experts, stable=True)
    experts, ends = placement.experts[order], placement.ends[order]
    same = jnp.concatenate([jnp.zeros(1, bool), experts[1:] == experts[:-1]])
    begins = jnp.where(same, jnp.roll(ends, 1), 0)
    amount = jnp.sum(sizes, axis=0)[experts]
    first = (jnp.cumsum(sizes, axis=0) - sizes)[:, experts]
    own = sizes[:, experts]
    low, high = (jnp.clip(_part(amount, end), first, first + own) for end in (begins, ends))
    counts = high - low
    back = jnp.argsort(order)
    return counts[:, back], (jnp.cumsum(counts, axis=1) - counts)[:, back]


def _part(amount: jax.Array, share: jax.Array) -> jax.Array:
    """Return amount * share / WHOLE, rounded down, without an overflow of int32."""
    return amount // WHOLE * share + amount % WHOLE * share // WHOLE


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def to_slots(w: jax.Array, experts: jax.Array, axis: str) -> jax.Array:
    """Return the weights of this device's slots [slots / devices, ...], of its own experts' [experts / devices, ...].

    TPUs send each slot its expert by a ragged all-to-all; elsewhere every device gathers all. The gradient of an expert
    is the sum of those of its slots, in float32, in the order of slots.

    Args:
        w: weights of the experts that are at home here, in their order; inside of a shard_map.
        experts: int32 [slots], the table.
        axis: mesh axis over which the experts are sharded.
    """
    sent = functools.partial(_ragged_to_slots, axis=axis)
    return jax.lax.platform_dependent(w, experts, tpu=sent, default=functools.partial(gathered_to_slots, axis=axis))


def gathered_to_slots(w: jax.Array, experts: jax.Array, *, axis: str) -> jax.Array:
    """Return `to_slots` by gathering all experts."""
    return jax.lax.all_gather(w, axis, tiled=True)[_mine(experts, axis)]


def _ragged_to_slots(w: jax.Array, experts: jax.Array, *, axis: str) -> jax.Array:
    own, me, devices = len(w), jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    home = experts // own
    slots = len(experts) // devices
    out = vary(jnp.zeros_like(w, shape=(slots, *w.shape[1:])), varying(w))
    places = jnp.arange(len(experts), dtype=jnp.int32) % slots
    sent = (home == me).astype(jnp.int32)
    received = (_mine(home, axis)[None] == jnp.arange(devices)[:, None]).astype(jnp.int32).reshape(-1)
    start = jnp.where(home == me, experts % own, 0)
    return jax.lax.ragged_all_to_all(w, out, *_over(w, axis, start, sent, places, received), axis_name=axis)


def _to_home(g: jax.Array, experts: jax.Array, own: int, axis: str) -> jax.Array:
    sent = functools.partial(_ragged_to_home, own=own, axis=axis)
    default = functools.partial(gathered_to_home, own=own, axis=axis)
    return jax.lax.platform_dependent(g, experts, tpu=sent, default=default)


def gathered_to_home(g: jax.Array, experts: jax.Array, *, own: int, axis: str) -> jax.Array:
    """Return the sums over the slots of each of this device's `own` experts, by gathering all slots."""
    everyone, number = jax.lax.all_gather(g, axis, tiled=True), _number(experts)
    mine = jax.lax.axis_index(axis) * own + jnp.arange(own, dtype=jnp.int32)

    def one(turn: Any) -> jax.Array:
        is_it = (experts[None] == mine[:, None]) & (number[None] == turn)
        rows = everyone[jnp.argmax(is_it, axis=1)]
        return jnp.where(jnp.any(is_it, axis=1).reshape(-1, *[1] * (g.ndim - 1)), rows, 0)

    return _added(one, number, g)


def _ragged_to_home(g: jax.Array, experts: jax.Array, *, own: int, axis: str) -> jax.Array:
    me, devices, number = jax.lax.axis_index(axis), jax.lax.axis_size(axis), _number(experts)
    slots = len(experts) // devices
    each = jnp.arange(devices, dtype=jnp.int32)[:, None]
    here, turns = _mine(experts, axis), _mine(number, axis)
    start = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (devices, slots)).reshape(-1)
    places = jnp.broadcast_to(here % own, (devices, slots)).reshape(-1)

    def one(turn: Any) -> jax.Array:
        sent = ((here // own)[None] == each) & (turns == turn)[None]
        received = (experts // own == me) & (number == turn)
        sizes = (a.astype(jnp.int32).reshape(-1) for a in (sent, received))
        nothing = vary(jnp.zeros_like(g, shape=(own, *g.shape[1:])), varying(g))
        to, come = sizes
        return jax.lax.ragged_all_to_all(g, nothing, *_over(g, axis, start, to, places, come), axis_name=axis)

    return _added(one, number, g)


def _added(one: Any, number: jax.Array, g: jax.Array) -> jax.Array:
    """Return the sum of `one(turn)` over as many turns as an expert has slots at most, in their order."""
    first = vary(one(0).astype(jnp.float32), varying(g))

    def more(carry: Any) -> Any:
        turn, total = carry
        return turn + 1, total + one(turn).astype(jnp.float32)

    last = jnp.max(number)
    start = (jnp.ones_like(last), first)
    return jax.lax.while_loop(lambda carry: carry[0] <= last, more, start)[1].astype(g.dtype)


def _number(experts: jax.Array) -> jax.Array:
    """Return int32 [slots], how many slots of the same expert come before."""
    same = experts[:, None] == experts[None]
    return jnp.sum(jnp.tril(same, -1), axis=1, dtype=jnp.int32)


def _mine(of_slots: jax.Array, axis: str) -> jax.Array:
    slots = len(of_slots) // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(of_slots, jax.lax.axis_index(axis) * slots, slots)


def _over(like: jax.Array, axis: str, *slices: jax.Array) -> tuple[jax.Array, ...]:
    """Return slices that vary as rows do, as a ragged all-to-all takes them."""
    return tuple(vary(a, {axis} & varying(like)) for a in slices)


def _to_slots_backward(axis: str, kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    experts, like = kept
    return _to_home(g, experts, like.shape[1], axis), None


# The backward pass keeps the number of experts, no values.
to_slots.defvjp(lambda w, experts, axis: (to_slots(w, experts, axis), (experts, w[None, :, :0])), _to_slots_backward)
