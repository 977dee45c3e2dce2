"""Contexts: what each token may attend to, and where keys and values are stored.

One attention layer serves training, scoring, prefill and decoding; these small classes are all that differs.

* `PackedContext`: rows of packed documents (supervised training).
* `GroupContext`: a prompt computed once, and the n completions that continue it (RL training).
* `PackedGroupContext`: several prompts, and completions of them of any lengths (RL training without padding), or trees
  of what completions have in common.
* in sharded_rows.py: `ShardedRowsContext`, the rows of either over devices that have a part of their tokens each.
* in paged.py and window.py: `PagedContext` and `WindowContext`, with a cache (prefill, decoding), and `RowContext`
  (scoring).

A group's *prefix* is the prompt without its last token; each completion starts with that last token. So a completion
of T inputs has exactly T targets.

Shape letters: g groups, n completions of a group, p prefix length, s/t completion length; k, q, h as in
attention/grouped_query.py.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.dispatch import AttentionParams, attend, attend_shared_prefix
from axlearn_like.kernels.attention.interface import MASKED, Layout, ScoreRules
from axlearn_like.kernels.attention.shared_prefix import SharedPrefix, SharedPrefixes, SharedPrefixTrees
from axlearn_like.kernels.attention.xla import batched_dot, capped, mix, position_mask, softmax_with_sinks
from axlearn_like.remat import checkpoint_name
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain, partition


class Context(Protocol):
    """The interface between the attention layer and a context."""

    @property
    def positions(self) -> jax.Array:
        """int32 [batch, length], for rotary embeddings."""
        ...

    @property
    def live(self) -> jax.Array | None:
        """Mask of the tokens that are not padding, bool [batch, length]; None: that is not known."""
        ...

    def attend(
        self, q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, cache: Any, attention: AttentionParams
    ) -> tuple[jax.Array, Any]:
        """Return mixed values [batch, length, k, q, h] of the queries, and this layer's updated cache."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedContext:
    """Causal attention within each segment of a packed row."""

    positions: jax.Array  # int32 [batch, length], restarting at 0 in each segment
    segment_ids: jax.Array  # int32 [batch, length]; 0 marks padding, which attends only to padding
    # Order of the tokens of a row, if the mesh shards rows (see context_parallel/zigzag.py)
    layout: Layout = dataclasses.field(default="straight", metadata={"static": True})

    @property
    def live(self) -> jax.Array:
        """Mask of the tokens that are not padding, bool [batch, length]."""
        return self.segment_ids != 0

    def attend(
        self, q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, cache: None, attention: AttentionParams
    ) -> tuple[jax.Array, None]:
        """Return attention within segments; there is no cache."""
        mixed = attend(q_btkqh, k_btkh, v_btkh, attention, segment_ids=self.segment_ids, layout=self.layout)
        return mixed, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupContext:
    """Rows that hold one prefix and its completions: [g, p + n * t]."""

    prefix_lengths: jax.Array  # int32 [groups], live tokens of the (right-padded) prefix
    prefix_size: int = dataclasses.field(metadata={"static": True})  # p, the padded prefix length
    completions: int = dataclasses.field(metadata={"static": True})  # n
    completion_size: int = dataclasses.field(metadata={"static": True})  # t, the padded completion length
    completion_lengths: Any = None  # int32 [g, n], live tokens of the completions, None where that is not known

    @property
    def live(self) -> jax.Array:
        """Mask of the tokens that are not padding, bool [g, p + n * t]."""
        if self.completion_lengths is None:
            return self.seen()
        steps = jnp.arange(self.completion_size) < self.completion_lengths[..., None]
        prefix = jnp.arange(self.prefix_size) < self.prefix_lengths[:, None]
        steps = jnp.reshape(steps, (len(prefix), -1), out_sharding=partition("batch", None))
        return jnp.concatenate([prefix, steps], axis=1)

    @property
    def positions(self) -> jax.Array:
        """int32 [g, p + n * t]: completions continue after the live tokens of their prefix."""
        groups = self.prefix_lengths.shape[0]
        prefix = jnp.broadcast_to(jnp.arange(self.prefix_size), (groups, self.prefix_size))
        prefix = constrain(prefix, "batch", None)
        steps = jnp.tile(jnp.arange(self.completion_size), self.completions)
        return jnp.concatenate([prefix, self.prefix_lengths[:, None] + steps[None]], axis=1)

    def attend(
        self, q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, cache: None, attention: AttentionParams
    ) -> tuple[jax.Array, None]:
        """Return attention over the prefix and the own completion; there is no cache."""
        require_complete_rows(self)
        shared_prefix = SharedPrefix(self.prefix_size, self.completions, self.completion_size)
        mixed = attend_shared_prefix(
            *(q_btkqh, k_btkh, v_btkh, attention),
            shared_prefix=shared_prefix,
            segment_ids=self.seen().astype(jnp.int32),
        )
        if mixed is not None:
            return mixed, cache
        prefix_q, completion_q = self._split(q_btkqh)
        prefix_k, completion_k = self._split(k_btkh)
        prefix_v, completion_v = self._split(v_btkh)
        rules, sinks = attention.rules, attention.sinks
        places, steps = jnp.arange(self.prefix_size), jnp.arange(self.completion_size)
        prefix = mix(prefix_q, prefix_k, prefix_v, _visible(rules, places, places)[None], rules, sinks)
        prefix_mask = (places < self.prefix_lengths[:, None])[:, None]
        if rules.window is not None:
            behind = self.prefix_lengths[:, None, None] + steps[:, None] - places
            prefix_mask = prefix_mask & (behind < rules.window)
        completion = _attend_completions(
            completion_q,
            ((prefix_k, prefix_v), (completion_k, completion_v)),
            prefix_mask,
            _visible(rules, steps, steps),
            attention,
        )
        sharding = partition("batch", None, "heads", None, None)
        flat = jnp.reshape(completion, (completion.shape[0], -1, *completion.shape[3:]), out_sharding=sharding)
        return checkpoint_name(jnp.concatenate([prefix, flat], axis=1), "context"), cache

    def seen(self) -> jax.Array:
        """Return bool [g, p + n * t]: not padding of the prefix (nothing before it sees padding of a completion)."""
        places = jnp.arange(self.prefix_size + self.completions * self.completion_size)
        return (places < self.prefix_lengths[:, None]) | (places >= self.prefix_size)

    def _split(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        prefix, rest = x[:, : self.prefix_size], x[:, self.prefix_size :]
        shape = (x.shape[0], self.completions, self.completion_size, *x.shape[2:])
        sharding = partition("batch", None, None, "heads", *[None] * (x.ndim - 3))
        return prefix, jnp.reshape(rest, shape, out_sharding=sharding)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedGroupContext:
    """Rows that hold the prefixes of some groups, then completions of these groups: [batch, p + t]."""

    prefix_segments: jax.Array  # int32 [batch, p], the group of each token, from 1 in each row; 0 marks padding
    segments: jax.Array  # int32 [batch, t], the same of the completions
    prefix_positions: jax.Array  # int32 [batch, p], restarting at 0 in each group
    completion_positions: jax.Array  # int32 [batch, t], continuing after the prefix
    # int32 [batch, t], the index, from 0, at which the token's completion begins; None: there are trees
    starts: jax.Array | None
    # int32 [batch, t], the index at which all ends that continues the token (`SharedPrefixTrees`), or None
    ends: jax.Array | None = None

    @property
    def positions(self) -> jax.Array:
        """int32 [batch, p + t]."""
        return jnp.concatenate([self.prefix_positions, self.completion_positions], axis=1)

    @property
    def live(self) -> jax.Array:
        """Mask of the tokens that are not padding, bool [batch, p + t]."""
        return jnp.concatenate([self.prefix_segments, self.segments], axis=1) != 0

    def attend(
        self, q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, cache: None, attention: AttentionParams
    ) -> tuple[jax.Array, None]:
        """Return attention over the group's prefix and the own completion; there is no cache."""
        require_complete_rows(self)
        size, length = self.prefix_segments.shape[1], self.segments.shape[1]
        rows = (SharedPrefixes if self.ends is None else SharedPrefixTrees)(size, length)
        mixed = attend_shared_prefix(
            *(q_btkqh, k_btkh, v_btkh, attention),
            shared_prefix=rows,
            segment_ids=jnp.concatenate([self.prefix_segments, self.segments], axis=1),
            codes=rows.codes(self.starts if self.ends is None else self.ends),
        )
        if mixed is not None:
            return mixed, cache
        rules = attention.rules
        same = self.prefix_segments[:, :, None] == self.prefix_segments[:, None, :]
        places = jnp.arange(size)
        prefix_mask = same & _visible(rules, places, places)
        prefix = mix(q_btkqh[:, :size], k_btkh[:, :size], v_btkh[:, :size], prefix_mask, rules, attention.sinks)
        to_prefix = self.segments[:, :, None] == self.prefix_segments[:, None, :]
        if rules.window is not None:
            behind = self.completion_positions[:, :, None] - self.prefix_positions[:, None, :]
            to_prefix = to_prefix & (behind < rules.window)
        completion = _attend_completions(
            q_btkqh[:, None, size:],
            ((k_btkh[:, :size], v_btkh[:, :size]), (k_btkh[:, None, size:], v_btkh[:, None, size:])),
            to_prefix,
            self._own_mask(rules)[:, None, None, None],
            attention,
        )
        mixed = jnp.concatenate([prefix, completion[:, 0]], axis=1)
        return checkpoint_name(mixed, "context"), cache

    def _own_mask(self, rules: ScoreRules) -> jax.Array:
        """Return bool [batch, t, s]: tokens behind the prompts see those of their completion, or of their ancestors."""
        steps = jnp.arange(self.segments.shape[1])
        if self.ends is None:
            assert self.starts is not None
            return (self.starts[:, :, None] == self.starts[:, None, :]) & _visible(rules, steps, steps)
        if not rules.causal:
            raise UserError("Attention.causal=False: expected causal attention in trees")
        seen = (steps <= steps[:, None]) & (steps[:, None] < self.ends[:, None, :])
        if rules.window is None:
            return seen
        behind = self.completion_positions[:, :, None] - self.completion_positions[:, None, :]
        return seen & (behind < rules.window)


def require_complete_rows(context: Any) -> None:
    """Refuse a mesh that shards the length of rows (UserError: it does)."""
    if (cp_size := axis_sizes("length").get("sequence", 1)) > 1:
        raise UserError(
            f"mesh axis sequence {cp_size}: {type(context).__name__} needs complete rows; expected sequence 1"
        )


def _visible(rules: ScoreRules, queries: jax.Array, keys: jax.Array) -> jax.Array:
    visible = position_mask(rules, queries, keys)
    return jnp.ones((queries.size, keys.size), bool) if visible is None else visible


def _attend_completions(
    q: jax.Array,
    keys_and_values: tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    prefix_mask_gtp: jax.Array,
    own_mask: jax.Array,
    attention: AttentionParams,
) -> jax.Array:
    """Attention over the prefix, then the own completion, with one softmax; [g, n, t, k, q, h].

    Keys and values are those of prefixes, [g, p, k, h], and of completions, [g, n, s, k, h]. The prefix's mask may be
    the same for all t. The own mask is [t, s], or [g, 1, 1, 1, t, s].
    """
    prefix_k, prefix_v = (x.transpose(0, 2, 1, 3) for x in keys_and_values[0])
    own_k, own_v = (x.transpose(0, 3, 1, 2, 4) for x in keys_and_values[1])
    groups, completions, length, heads, per_head, width = q.shape
    q = q.transpose(0, 3, 1, 4, 2, 5)  # g k n q t h
    split = (groups, heads, completions, per_head, length, -1)
    all_rows = _reshape(q, groups, heads, -1, width)
    own_rows = _reshape(q, groups, heads, completions, -1, width)
    to_prefix = _reshape(batched_dot(all_rows, prefix_k, contract_last=True), *split)
    to_own = _reshape(batched_dot(own_rows, own_k, contract_last=True), *split)
    rules, sinks = attention.rules, attention.sinks
    scale = rules.scale_of(width)
    to_prefix = jnp.where(prefix_mask_gtp[:, None, None, None], capped(to_prefix * scale, rules), MASKED)
    to_own = jnp.where(own_mask, capped(to_own * scale, rules), MASKED)
    scores = jnp.concatenate([to_prefix, to_own], axis=-1)
    weights = softmax_with_sinks(scores, None if sinks is None else sinks[None, :, None, :, None, None])
    weights = weights.astype(own_v.dtype)
    prefix_size = to_prefix.shape[-1]
    from_prefix = batched_dot(_reshape(weights[..., :prefix_size], groups, heads, -1, prefix_size), prefix_v)
    own_weights = _reshape(weights[..., prefix_size:], groups, heads, completions, per_head * length, -1)
    from_own = batched_dot(own_weights, own_v)
    mixed = (_reshape(from_prefix, *split) + _reshape(from_own, *split)).astype(own_v.dtype)
    return mixed.transpose(0, 2, 4, 1, 3, 5)


def _reshape(x: jax.Array, *shape: int) -> jax.Array:
    """Return x reshaped, batch and heads in front and sharded as before: a plain reshape loses that for size 1."""
    return jnp.reshape(x, shape, out_sharding=partition("batch", "heads", *[None] * (len(shape) - 2)))
