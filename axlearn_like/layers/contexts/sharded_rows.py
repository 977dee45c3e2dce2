"""Rows of prompts and their completions whose tokens are sharded over the mesh (context parallelism).

The rows are those of `GroupContext` and `PackedGroupContext`, padded to equal parts for the devices and in zigzag order
(kernels/attention/context_parallel/zigzag.py). Each device has the queries of its own tokens and gathers all keys.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.context_parallel import zigzag
from axlearn_like.kernels.attention.dispatch import AttentionParams, attend_shared_prefix
from axlearn_like.kernels.attention.interface import MASKED
from axlearn_like.kernels.attention.shared_prefix import SharedPrefix, SharedPrefixes
from axlearn_like.kernels.attention.xla import capped, softmax_with_sinks
from axlearn_like.layers.contexts.packed import GroupContext, PackedGroupContext
from axlearn_like.remat import checkpoint_name
from mesh.devices import platform
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain, partition

_TPU_BLOCK = 128  # tokens of a half of a device's part: those of a block of the splash kernel


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The order in which devices share the tokens of rows."""

    length: int  # tokens of a row
    padded: int  # tokens with padding behind, so that devices have equally many
    cp_size: int  # devices

    @property
    def places(self) -> np.ndarray:
        """The index in the row of each token, int32 [padded]."""
        return zigzag.order(self.padded, self.cp_size)

    def split(self, x: jax.Array, *, before: int = 0, fill: int = 0) -> jax.Array:
        """Return x [b, tokens, ...] in this order, sharded; `before` and behind it stands `fill`, up to `padded`."""
        rest = [None] * (x.ndim - 2)
        behind = self.padded - before - x.shape[1]
        x = constrain(x, "batch", None, *rest)  # integers and masks: small beside any activation
        x = jnp.pad(x, [(0, 0), (before, behind), *[(0, 0)] * len(rest)], constant_values=fill)
        return constrain(x[:, self.places], "batch", "length", *rest)

    def join(self, x: jax.Array) -> jax.Array:
        """Return x [b, padded], one number a token, as rows [b, length] that are complete on each device."""
        return zigzag.restore(constrain(x, "batch", None), self.cp_size, "zigzag")[:, : self.length]


def row_order(length: int, chunks: int = 1) -> RowOrder | None:
    """Return the order of rows on the mesh in force; None: they are complete on each device.

    Args:
        chunks: parts of a device's tokens that are computed one after another.
    """
    cp_size = axis_sizes("length").get("sequence", 1)
    if cp_size == 1:
        return None
    return RowOrder(length, shared_length(length, cp_size, platform(), chunks), cp_size)


def shared_length(length: int, cp_size: int, platform: str, chunks: int = 1) -> int:
    """Return the length to which rows are padded for so many devices of a platform; `chunks`: see `row_order`."""
    if cp_size == 1:
        return length
    unit = cp_size * math.lcm(2 * (_TPU_BLOCK if platform == "tpu" else 1), chunks)
    return -(-length // unit) * unit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedRowsContext:
    """Rows that hold prompts, then completions of them, each device with a part of their tokens."""

    positions: jax.Array  # int32 [b, t], restarting in each prompt and continuing in its completions
    segments: jax.Array  # int32 [b, t]; a token sees those of its own segment only
    starts: jax.Array  # int32 [b, t], the index, from 0, at which the token's completion begins; 0 in prompts
    live: jax.Array  # bool [b, t], False at padding
    # Sizes of the places for prompts and for completions
    rows: SharedPrefix | SharedPrefixes = dataclasses.field(metadata={"static": True})
    order: RowOrder = dataclasses.field(metadata={"static": True})  # the order of the tokens

    def attend(
        self, q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, cache: None, attention: AttentionParams
    ) -> tuple[jax.Array, None]:
        """Return attention over the prompt and the own completion; there is no cache.

        Raises:
            UserError: attention is not causal, or keys are to go around in a ring.
        """
        if attention.context_parallel.ring:
            raise UserError(
                "Attention.context_parallel=Ring.Config(): expected AllGather.Config() for rows of prompts and their "
                "completions on a mesh with a sequence axis"
            )
        if not attention.rules.causal:
            raise UserError("Attention.causal=False: expected causal attention on a mesh with a sequence axis")
        codes = None
        if isinstance(self.rows, SharedPrefixes):
            codes = self.rows.codes_at(self._places(), self.starts)
        mixed = attend_shared_prefix(
            *(q_btkqh, k_btkh, v_btkh, attention),
            shared_prefix=self.rows,
            segment_ids=self.segments,
            codes=codes,
            layout="zigzag",
        )
        if mixed is None:
            mixed = checkpoint_name(self._mix(q_btkqh, k_btkh, v_btkh, attention), "context")
        return mixed, cache

    def _mix(self, q: jax.Array, k: jax.Array, v: jax.Array, attention: AttentionParams) -> jax.Array:
        """Return attention by XLA's products, which store all scores of a device's queries."""
        rules, sinks = attention.rules, attention.sinks
        k, v = (constrain(x, "batch", None, "heads", None) for x in (k, v))
        scores = jnp.einsum("btkqh,bskh->bkqts", q, k, preferred_element_type=jnp.float32)
        scores = capped(scores * rules.scale_of(q.shape[-1]), rules)
        scores = jnp.where(self._visible(rules.window)[:, None, None], scores, MASKED)
        weights = softmax_with_sinks(scores, None if sinks is None else sinks[None, :, :, None, None])
        mixed = jnp.einsum("bkqts,bskh->btkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return mixed.astype(v.dtype)

    def _visible(self, window: int | None) -> jax.Array:
        """Return bool [b, t, s]: a device's queries see keys; both are in this order."""

        def keys(x: jax.Array) -> jax.Array:
            return constrain(x, "batch", None)[:, None, :]

        places, keys_at = self._places()[:, None], self.order.places
        own = (keys_at < self.rows.prefix) | (self.starts[:, :, None] == keys(self.starts))
        seen = (self.segments[:, :, None] == keys(self.segments)) & (keys_at <= places) & own
        if window is None:
            return seen
        return seen & (self.positions[:, :, None] - keys(self.positions) < window)

    def _places(self) -> jax.Array:
        """Return the index in the row of each token, int32 [t], sharded as the tokens are."""
        return constrain(jnp.asarray(self.order.places), "length")


def shard_rows(context: GroupContext | PackedGroupContext, order: RowOrder) -> ShardedRowsContext:
    """Return the context of rows whose tokens are in this order (UserError: completions are trees)."""
    if isinstance(context, GroupContext):
        size, completions = context.completion_size, context.completions
        rows = SharedPrefix(context.prefix_size, completions, size)
        segments = context.seen().astype(jnp.int32)
        steps = jnp.asarray(np.repeat(np.arange(completions, dtype=np.int32) * size, size))
        starts = jnp.broadcast_to(steps, (len(segments), len(steps)), out_sharding=partition("batch", None))
    else:
        if context.starts is None:
            raise UserError("packing.tree=True: expected False on a mesh with a sequence axis")
        rows = SharedPrefixes(context.prefix_segments.shape[1], context.segments.shape[1])
        segments = jnp.concatenate([context.prefix_segments, context.segments], axis=1)
        starts = context.starts
    arrays: dict[str, Any] = {"positions": context.positions, "segments": segments, "live": context.live}
    arrays = {name: order.split(x) for name, x in arrays.items()}
    return ShardedRowsContext(**arrays, starts=order.split(starts, before=rows.prefix), rows=rows, order=order)
