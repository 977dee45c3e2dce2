"""Attention over blocks of keys, in one order of sums for all contexts with a cache, and for scoring.

Keys ascend by position, from the first token of the sequence, in blocks that begin at fixed positions (`key_blocks`).
Scores of all blocks meet in one softmax, which is divided at the end, as in all blockwise kernels; the weighted sums of
the blocks are added in their order. Padding at the end adds exact zeros. So a token's output does not depend on chunk,
window or batch, on CPUs in float32.

Shape letters: r rows, c tokens of each, n = c * q queries of a key/value head, s keys; k, q, h as in
attention/grouped_query.py.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.dispatch import AttentionParams
from axlearn_like.kernels.attention.interface import MASKED, ScoreRules
from axlearn_like.kernels.attention.xla import batched_dot, capped
from axlearn_like.kernels.deterministic import each, key_exponentials
from axlearn_like.layers.linear import UNSPLIT_SUM
from mesh.errors import UserError
from mesh.rules import constrain, partition

KEY_BLOCK = 64  # blocks are multiples of this many keys, but for one at the end of all that a row can have
_FEW_QUERIES = 48


def key_blocks(size: int, head_dim: int) -> list[slice]:
    """Return the blocks of a window of `size` keys: up to key 64, 128, 256, 384, 512, 768, 1024, 1536, ...

    They begin at fixed positions, whatever the window, so that sums over keys are taken in one order; small ones come
    first, so that short rows read little; none is so wide that XLA's CPU matmul splits a sum over it (see
    `linear._matmul`).
    """
    widest = max(1, UNSPLIT_SUM // max(head_dim, KEY_BLOCK) // KEY_BLOCK) * KEY_BLOCK
    ends = [0, KEY_BLOCK]
    while ends[-1] < size:
        power = 1 << (ends[-1].bit_length() - 1)
        ends.append(ends[-1] + min(widest, max(KEY_BLOCK, power // 2 if power > 2 * KEY_BLOCK else power)))
    return [slice(start, min(end, size)) for start, end in itertools.pairwise(ends)]


def attend_blocks(
    q_rckqh: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    positions: jax.Array,
    attention: AttentionParams,
) -> jax.Array:
    """Return attention of each row's queries over blocks of keys, up to the query's own position; [r, c, k, q, h].

    Args:
        keys: by block (see `key_blocks`), [r, k, h, s], or split further: [r, k, s / b, h, b].
        values: by block, [r, k, s, h].
        positions: int32 [r, c], of the queries.
        attention: rules and sinks; its kernel is not used here.

    Raises:
        UserError: attention is not causal: a query would see keys that do not exist yet.
    """
    rules = attention.rules
    require_causal(rules)
    length, per_head, width = q_rckqh.shape[1], q_rckqh.shape[3], q_rckqh.shape[4]
    sharding, values_dtype = ("batch", "heads", None, None), values[0].dtype
    q, blocks = flat_queries(q_rckqh, rules), key_blocks(sum(v.shape[2] for v in values), width)
    scores = [block_scores(q, constrain(k, *sharding, *[None] * (k.ndim - 4))) for k in keys]
    scores = [mask_scores(x, block.start, positions, per_head, rules) for x, block in zip(scores, blocks, strict=True)]
    weights, total, peak = key_exponentials(*scores)
    total = total_with_sinks(total, peak, attention.sinks, length)
    parts = [
        weighted_sum(x.astype(values_dtype), constrain(v, *sharding)) for x, v in zip(weights, values, strict=True)
    ]
    return split_queries(sum(parts) / total, q_rckqh, values[0].shape[-1])


def require_causal(rules: ScoreRules) -> None:
    """Refuse attention in which a query would see keys that do not exist yet (UserError)."""
    if not rules.causal:
        raise UserError("Attention.causal=False is not supported with a cache; expected causal attention")


def flat_queries(q_rckqh: jax.Array, rules: ScoreRules) -> jax.Array:
    """Return scaled queries as rows of a product, [r, k, c * q, h]."""
    rows, length, heads, per_head, width = q_rckqh.shape
    q = constrain(q_rckqh, "batch", None, "heads", None, None).transpose(0, 2, 1, 3, 4) * rules.scale_of(width)
    shape = (rows, heads, length * per_head, width)
    return jnp.reshape(q, shape, out_sharding=partition("batch", "heads", None, None))


def split_queries(mixed_rknh: jax.Array, q_rckqh: jax.Array, width: int) -> jax.Array:
    """Return the mixed values of `flat_queries` as those of the queries, [r, c, k, q, h], in their type."""
    rows, length, heads, per_head, _ = q_rckqh.shape
    split = partition("batch", "heads", None, None, None)
    shape = (rows, heads, length, per_head, width)
    return jnp.reshape(mixed_rknh.astype(q_rckqh.dtype), shape, out_sharding=split).transpose(0, 2, 1, 3, 4)


def mask_scores(
    scores_rkns: jax.Array, start: jax.Array | int, positions: jax.Array, per_head: int, rules: ScoreRules
) -> jax.Array:
    """Return capped scores of keys from position `start`, masked where a query at `positions` [r, c] sees them not."""
    last = jnp.repeat(constrain(positions, "batch", None), per_head, axis=1)
    places = jnp.arange(scores_rkns.shape[-1])
    places = places if isinstance(start, int) and start == 0 else places + start
    visible = places <= last[..., None]
    if rules.window is not None:
        visible &= places > last[..., None] - rules.window
    return jnp.where(visible[:, None], capped(scores_rkns, rules), MASKED)


def total_with_sinks(total: jax.Array, peak: jax.Array, sinks: jax.Array | None, length: int) -> jax.Array:
    """Return the sum of exponentials with that of the sinks: one more key of each head, whose value is zero."""
    if sinks is None:
        return total
    sinks = sinks.astype(jnp.float32)[:, None] + jnp.zeros((length, 1))
    sinks = jnp.reshape(sinks, (len(sinks), -1), out_sharding=partition("heads", None))
    return total + each(jnp.exp, sinks[:, :, None] - peak)


def block_scores(q_rknh: jax.Array, keys: jax.Array) -> jax.Array:
    """Return queries x keys, float32 [r, k, n, s]; keys [r, k, h, s], or split further: [r, k, s / b, h, b]."""
    if keys.ndim == 4:
        return batched_dot(q_rknh, keys)
    rows, heads, count, _ = q_rknh.shape
    blocks, size = keys.shape[2], keys.shape[4]
    if size % KEY_BLOCK and count > _FEW_QUERIES:  # see `weighted_sum`
        keys = jnp.pad(keys, [(0, 0)] * 4 + [(0, -size % KEY_BLOCK)])
    q = jnp.broadcast_to(q_rknh[:, :, None], (rows, heads, blocks, *q_rknh.shape[2:]))
    scores = batched_dot(constrain(q, "batch", "heads", None, None, None), keys)[..., :size].transpose(0, 1, 3, 2, 4)
    return jnp.reshape(scores, (rows, heads, count, -1), out_sharding=partition("batch", "heads", None, None))


def weighted_sum(weights_rkns: jax.Array, v_rksh: jax.Array) -> jax.Array:
    """Return weights x values over s, float32 [r, k, n, h].

    XLA's CPU matmul sums a result whose columns are not a multiple of 64, or of so few keys, in another order if there
    are many rows, so it is widened: prefill and decoding stay equal to the bit.
    """
    width, many = v_rksh.shape[-1], weights_rkns.shape[2] > _FEW_QUERIES
    if many and (rest := -v_rksh.shape[2] % KEY_BLOCK):
        weights_rkns = jnp.pad(weights_rkns, [(0, 0)] * 3 + [(0, rest)])
        v_rksh = jnp.pad(v_rksh, [(0, 0)] * 2 + [(0, rest), (0, 0)])
    if width % 64 and (many or width % 32):
        v_rksh = jnp.pad(v_rksh, [(0, 0)] * 3 + [(0, -width % 64)])
    return batched_dot(weights_rkns, v_rksh)[..., :width]
