"""A language model's head in tiles of words: the statistics of tokens on a mesh, without logits.

Each device computes those of its own tokens. A mesh axis that shards the words, such as `tensor`, keeps them sharded:
each of its devices goes through its own words, and what they exchange are a few numbers for each token.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from axlearn_like.kernels.policy_head.statistics import OtherPolicy, policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules, Statistics
from mesh.sharding import entry_axes, full_spec, shard_like, token_axes, vary


class OtherHead(NamedTuple):
    """Another policy's final hidden states [batch, length, its width] of the same tokens, and its output layer."""

    x: Any
    output: Any


def head_statistics(
    output: Any,
    x: jax.Array,
    targets: jax.Array,
    rules: HeadRules,
    *,
    candidates: jax.Array | None = None,
    reference: OtherHead | None = None,
) -> Statistics:
    """Return the statistics of tokens, arrays [batch, length, ...] sharded as x is over these two axes.

    Args:
        output: the layer that makes logits.
        x: final hidden states [batch, length, dim].
        targets: int32 [batch, length].
        rules: temperature and size of tiles; the soft cap is that of the layer.
        candidates: int32 [batch, length, k], see `policy_statistics`.
        reference: another policy, of which the first words are those of this one; no gradient.
    """
    x = output.factors(x)
    axes, columns = token_axes(x), output.columns_dv
    count = columns.shape[1]
    weight, shards = _own_words(columns.astype(x.dtype), axes, count)
    arrays: list[Any] = [targets if full_spec(x) is None else shard_like(targets, x), candidates, None, None]
    rules, other_rules = dataclasses.replace(rules, soft_cap=output.logit_soft_cap), None
    if candidates is not None:
        arrays[1] = shard_like(candidates, x)
    if reference is not None:
        other = reference.output
        other_rules, other_x = dataclasses.replace(rules, soft_cap=other.logit_soft_cap), other.factors(reference.x)
        own, _ = _own_words(other.columns_dv.astype(other_x.dtype), axes, count)
        arrays[2:] = shard_like(other_x, x), own
    of_own = partial(_of_own_tokens, rules, other_rules, axes, shards)
    if not axes and not shards:
        return of_own(x, weight, *arrays)
    rows, cut = PartitionSpec(*jax.typeof(x).sharding.spec[:2]), PartitionSpec(None, shards or None)
    specs = rows, cut, rows, None if candidates is None else rows, *((rows, cut) if reference else (None, None))
    return jax.shard_map(of_own, in_specs=specs, out_specs=rows, axis_names={*axes, *shards})(x, weight, *arrays)


def _of_own_tokens(
    rules: HeadRules,
    other_rules: HeadRules | None,
    axes: tuple[str, ...],
    words: tuple[str, ...],
    *arrays: Any,
) -> Statistics:
    """Return the statistics of one device's tokens; within a shard_map, if there is one."""
    x, weight, targets, candidates, other_x, other_weight = arrays

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[2:])

    reference = None
    if other_rules is not None:
        reference = OtherPolicy(flat(other_x), vary(other_weight, axes), other_rules)
    found = policy_statistics(
        flat(x),
        vary(weight, axes),
        flat(targets),
        rules,
        reference,
        candidates=None if candidates is None else flat(candidates),
        axes=words,
    )
    return jax.tree.map(lambda one: one.reshape(*targets.shape, *one.shape[1:]), found)


def _own_words(weight: jax.Array, axes: tuple[str, ...], count: int) -> tuple[jax.Array, tuple[str, ...]]:
    """Return the first columns of a head, gathered over these axes, and the axes over which they stay sharded."""
    spec = full_spec(weight)
    if spec is None:
        return weight[:, :count], ()
    words = tuple(name for name in entry_axes(spec[1]) if name not in axes)
    if weight.shape[1] > count:  # part of a larger vocabulary with other shards
        weight = jax.sharding.reshard(weight, PartitionSpec(None, None))[:, :count]
    return jax.sharding.reshard(weight, PartitionSpec(None, words or None)), words
