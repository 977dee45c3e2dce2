"""Attention by XLA: runs everywhere, supports everything, stores all scores. The reference for the other kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.interface import (
    MASKED,
    AttentionArrays,
    AttentionSignature,
    Kernel,
    KeyBlock,
    ScoreRules,
)
from mesh.rules import partition


class Xla(Kernel):
    """Scores of all pairs, float32 [b, k, q, t, s], left to the compiler to fuse."""

    explicit = True

    def supported(self, signature: AttentionSignature) -> str | None:
        """Return None: everything is supported."""
        return None

    def attend(self, arrays: AttentionArrays, signature: AttentionSignature) -> jax.Array:
        """Return mixed values [b, t, k, q, h]; see `Kernel.attend`."""
        visible = position_mask(signature.rules, arrays.places, jnp.arange(arrays.k_bskh.shape[1]))
        mask = arrays.same_segment_bts if visible is None else arrays.same_segment_bts & visible
        return mix(arrays.q_btkqh, arrays.k_bskh, arrays.v_bskh, mask, signature.rules, arrays.sinks_kq)

    def blocks(self, signature: AttentionSignature) -> "XlaBlocks":
        """Return the forward and backward pass of one block of keys, for a ring."""
        return XlaBlocks(signature.rules)


def position_mask(rules: ScoreRules, queries_t: Any, keys_s: Any) -> jax.Array | None:
    """Return which queries see which keys, bool [t, s], or None where every key is visible."""
    if not rules.causal:
        return None
    behind = queries_t[:, None] - keys_s[None, :]
    return behind >= 0 if rules.window is None else (behind >= 0) & (behind < rules.window)


def capped(scores: jax.Array, rules: ScoreRules) -> jax.Array:
    """Return scores after the soft cap."""
    return scores if rules.soft_cap is None else rules.soft_cap * jnp.tanh(scores / rules.soft_cap)


def softmax_with_sinks(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the softmax over the last axis with, if there are sinks (broadcast over the others), one more score."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    column = jnp.zeros_like(scores[..., :1]) + sinks.astype(scores.dtype)
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def mix(
    q: jax.Array, k: jax.Array, v: jax.Array, mask_bts: jax.Array, rules: ScoreRules, sinks_kq: jax.Array | None = None
) -> jax.Array:
    """Return plain attention, [b, t, k, q, h]. Query heads join the length, so each product is one batched matmul."""
    batch, length, heads, per_head, width = q.shape
    rows = _reshape(q.transpose(0, 2, 3, 1, 4), batch, heads, per_head * length, width)
    scores = batched_dot(rows, k.transpose(0, 2, 1, 3), contract_last=True)
    scores = _reshape(scores, batch, heads, per_head, length, -1) * rules.scale_of(width)
    scores = jnp.where(mask_bts[:, None, None], capped(scores, rules), MASKED)
    weights = softmax_with_sinks(scores, None if sinks_kq is None else sinks_kq[None, :, :, None, None])
    weights = _reshape(weights.astype(v.dtype), batch, heads, per_head * length, -1)
    mixed = batched_dot(weights, v.transpose(0, 2, 1, 3)).astype(v.dtype)
    return _reshape(mixed, batch, heads, per_head, length, v.shape[-1]).transpose(0, 3, 1, 2, 4)


def batched_dot(a: jax.Array, b: jax.Array, *, contract_last: bool = False) -> jax.Array:
    """Return the matrix product over the last two axes, accumulated in float32; `contract_last` transposes b."""
    batch = tuple(range(a.ndim - 2))
    b_axis = b.ndim - 1 if contract_last else b.ndim - 2
    dims = (((a.ndim - 1,), (b_axis,)), (batch, batch))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _reshape(x: jax.Array, *shape: int) -> jax.Array:
    """Return x reshaped, batch and heads in front and sharded as before: a plain reshape loses that for size 1."""
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.manual_axes) == set(mesh.axis_names):  # one device's part
        return jnp.reshape(x, shape)
    return jnp.reshape(x, shape, out_sharding=partition("batch", "heads", *[None] * (len(shape) - 2)))


class XlaBlocks:
    """One block of keys for some queries, forward and backward (`ring.BlockKernel`); heads before the length."""

    def __init__(self, rules: ScoreRules):
        self._rules = rules

    def forward(self, block: KeyBlock) -> tuple[jax.Array, jax.Array]:
        """Return mixed values and logarithmic sums of one block."""
        scores = self._scores(block)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(block.v_bksh.dtype)
        return _dot("bkqts,bksh->bkqth", weights, block.v_bksh), lse

    def backward(
        self, block: KeyBlock, out: jax.Array, lse: jax.Array, d_out: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return gradients of queries, keys and values of one block."""
        q_bkqth, k_bksh, v_bksh = block[:3]
        scores = self._scores(block)
        weights = jnp.exp(scores - lse[..., None])  # exactly 0 where masked
        d_out, kind = d_out.astype(jnp.float32), q_bkqth.dtype
        d_weights = _dot("bkqth,bksh->bkqts", d_out.astype(kind), v_bksh)
        d_scores = weights * (d_weights - jnp.sum(out * d_out, axis=-1, keepdims=True))
        if self._rules.soft_cap is not None:
            d_scores = jnp.where(scores > MASKED / 2, d_scores * (1 - (scores / self._rules.soft_cap) ** 2), 0.0)
        d_scores = (d_scores * self._rules.scale_of(q_bkqth.shape[-1])).astype(kind)
        return (
            _dot("bkqts,bksh->bkqth", d_scores, k_bksh),
            _dot("bkqts,bkqth->bksh", d_scores, q_bkqth),
            _dot("bkqts,bkqth->bksh", weights.astype(kind), d_out.astype(kind)),
        )

    def _scores(self, block: KeyBlock) -> jax.Array:
        scores = _dot("bkqth,bksh->bkqts", block.q_bkqth, block.k_bksh)
        scores *= self._rules.scale_of(block.q_bkqth.shape[-1])
        mask = block.segments[0][:, :, None] == block.segments[1][:, None, :]
        if (visible := position_mask(self._rules, *block.places)) is not None:
            mask = mask & visible
        return jnp.where(mask[:, None, None], capped(scores, self._rules), MASKED)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
