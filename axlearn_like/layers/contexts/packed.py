"""Contexts: what each token may attend to, and where keys and values live.

One attention layer serves training, scoring, prefill and decoding; these small classes are all that differs.

* `PackedContext`: rows of packed documents (supervised training).
* `GroupContext`: a prompt (*trunk*) computed once, and the n completions (*branches*) that continue it (RL training).
* in paged_context.py and window_context.py: `PagedContext` and `WindowContext`, with a cache (prefill, decoding), and
  `RowContext` (scoring).

A group's trunk is the prompt without its last token; each branch starts with that last token. So every branch of T
inputs has exactly T targets.

Shape letters: g groups, n branches of a group, p trunk length, s/t branch length; k, q, h as in attention.py.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.dispatch import Mixing, attend, attend_tree
from axlearn_like.kernels.attention.interface import MASKED, Layout, Rules
from axlearn_like.kernels.attention.shared_prefix import Tree
from axlearn_like.kernels.attention.xla import capped, mix, softmax_with_sinks, visible_by_place
from axlearn_like.layers.linear import batched_dot
from axlearn_like.remat import named
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain, partition


class Context(Protocol):
    """What the attention layer asks of a context."""

    @property
    def positions(self) -> jax.Array:
        """int32 [batch, length], for rotary embeddings."""
        ...

    def attend(
        self, q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, cache: Any, mixing: Mixing
    ) -> tuple[jax.Array, Any]:
        """Mix values for each query: [batch, length, k, q, h], named `context`, and this layer's updated cache."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedContext:
    """Causal attention within each segment of a packed row.

    Attributes:
        positions: int32 [batch, length], restarting at 0 in each segment.
        segment_ids: int32 [batch, length]; 0 marks padding, which attends only to padding.
        layout: in which order the tokens of a row stand, if the mesh cuts rows (see kernels/attention/zigzag.py).
    """

    positions: jax.Array
    segment_ids: jax.Array
    layout: Layout = dataclasses.field(default="straight", metadata={"static": True})

    def attend(
        self, q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, cache: None, mixing: Mixing
    ) -> tuple[jax.Array, None]:
        mixed = attend(q_btkqh, k_btkh, v_btkh, mixing, segment_ids=self.segment_ids, layout=self.layout)
        return mixed, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupContext:
    """Rows that hold one trunk and its branches: [g, p + n * t].

    Attributes:
        trunk_lengths: int32 [groups], live tokens of the (right-padded) trunk.
        trunk_size: p, the padded trunk length.
        branches: n.
        branch_size: t, the padded branch length.
    """

    trunk_lengths: jax.Array
    trunk_size: int = dataclasses.field(metadata={"static": True})
    branches: int = dataclasses.field(metadata={"static": True})
    branch_size: int = dataclasses.field(metadata={"static": True})

    @property
    def positions(self) -> jax.Array:
        groups = self.trunk_lengths.shape[0]
        trunk = jnp.broadcast_to(jnp.arange(self.trunk_size), (groups, self.trunk_size))
        trunk = constrain(trunk, "batch", None)
        steps = jnp.tile(jnp.arange(self.branch_size), self.branches)
        return jnp.concatenate([trunk, self.trunk_lengths[:, None] + steps[None]], axis=1)

    def attend(
        self, q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, cache: None, mixing: Mixing
    ) -> tuple[jax.Array, None]:
        whole_rows_only(self)
        tree = Tree(self.trunk_size, self.branches, self.branch_size)
        mixed = attend_tree(q_btkqh, k_btkh, v_btkh, mixing, tree=tree, live_bt=self._live(tree.length))
        if mixed is not None:
            return mixed, cache
        trunk_q, branch_q = self._split(q_btkqh)
        trunk_k, branch_k = self._split(k_btkh)
        trunk_v, branch_v = self._split(v_btkh)
        rules, sinks = mixing.rules, mixing.sinks
        places, steps = jnp.arange(self.trunk_size), jnp.arange(self.branch_size)
        trunk = mix(trunk_q, trunk_k, trunk_v, _visible(rules, places, places)[None], rules, sinks)
        trunk_mask = (places < self.trunk_lengths[:, None])[:, None]
        if rules.window is not None:
            behind = self.trunk_lengths[:, None, None] + steps[:, None] - places
            trunk_mask = trunk_mask & (behind < rules.window)
        branch = _attend_branches(
            branch_q,
            {
                "trunk_k": _heads_first(trunk_k),
                "trunk_v": _heads_first(trunk_v),
                "k": _branch_heads_first(branch_k),
                "v": _branch_heads_first(branch_v),
            },
            trunk_mask,
            _visible(rules, steps, steps),
            mixing,
        )
        spread = partition("batch", None, "heads", None, None)
        flat = jnp.reshape(branch, (branch.shape[0], -1, *branch.shape[3:]), out_sharding=spread)
        return named(jnp.concatenate([trunk, flat], axis=1), "context"), cache

    def _live(self, length: int) -> jax.Array:
        """Bool [g, p + n * t]: not padding of the trunk. That of a branch is seen by nothing before it."""
        places = jnp.arange(length)
        return (places < self.trunk_lengths[:, None]) | (places >= self.trunk_size)

    def _split(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        trunk, rest = x[:, : self.trunk_size], x[:, self.trunk_size :]
        shape = (x.shape[0], self.branches, self.branch_size, *x.shape[2:])
        spread = partition("batch", None, None, "heads", *[None] * (x.ndim - 3))
        return trunk, jnp.reshape(rest, shape, out_sharding=spread)


def whole_rows_only(context: Any) -> None:
    """Refuse to go on where the mesh cuts rows.

    Raises:
        UserError: it does.
    """
    if (ways := axis_sizes("length").get("sequence", 1)) > 1:
        raise UserError(
            f"mesh axis sequence {ways}: {type(context).__name__} needs rows in one piece; expected sequence 1"
        )


def _visible(rules: Rules, queries: jax.Array, keys: jax.Array) -> jax.Array:
    visible = visible_by_place(rules, queries, keys)
    return jnp.ones((queries.size, keys.size), bool) if visible is None else visible


def _heads_first(x_btkh: jax.Array) -> jax.Array:
    return x_btkh.transpose(0, 2, 1, 3)


def _branch_heads_first(x_gntkh: jax.Array) -> jax.Array:
    return x_gntkh.transpose(0, 3, 1, 2, 4)


def _attend_branches(
    q: jax.Array, cache: dict[str, jax.Array], trunk_mask_gtp: jax.Array, own_mask_ts: jax.Array, mixing: Mixing
) -> jax.Array:
    """Attention over the trunk, then the own branch, with one softmax; [g, n, t, k, q, h]. The trunk's mask may be the
    same for all t.
    """
    groups, branches, length, heads, per_head, width = q.shape
    q = q.transpose(0, 3, 1, 4, 2, 5)  # g k n q t h
    split = (groups, heads, branches, per_head, length, -1)
    all_rows = _reshape(q, groups, heads, -1, width)
    own_rows = _reshape(q, groups, heads, branches, -1, width)
    to_trunk = _reshape(batched_dot(all_rows, cache["trunk_k"], contract_last=True), *split)
    to_own = _reshape(batched_dot(own_rows, cache["k"], contract_last=True), *split)
    rules, sinks = mixing.rules, mixing.sinks
    scale = rules.scale_of(width)
    to_trunk = jnp.where(trunk_mask_gtp[:, None, None, None], capped(to_trunk * scale, rules), MASKED)
    to_own = jnp.where(own_mask_ts, capped(to_own * scale, rules), MASKED)
    scores = jnp.concatenate([to_trunk, to_own], axis=-1)
    weights = softmax_with_sinks(scores, None if sinks is None else sinks[None, :, None, :, None, None])
    weights = weights.astype(cache["v"].dtype)
    trunk_size = to_trunk.shape[-1]
    from_trunk = batched_dot(_reshape(weights[..., :trunk_size], groups, heads, -1, trunk_size), cache["trunk_v"])
    own_weights = _reshape(weights[..., trunk_size:], groups, heads, branches, per_head * length, -1)
    from_own = batched_dot(own_weights, cache["v"])
    mixed = (_reshape(from_trunk, *split) + _reshape(from_own, *split)).astype(cache["v"].dtype)
    return mixed.transpose(0, 2, 4, 1, 3, 5)


def _reshape(x: jax.Array, *shape: int) -> jax.Array:
    """Batch and heads stay in front and spread as they were: a plain reshape forgets that where their size is 1."""
    return jnp.reshape(x, shape, out_sharding=partition("batch", "heads", *[None] * (len(shape) - 2)))
