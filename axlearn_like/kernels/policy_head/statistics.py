"""The statistics of a policy's distributions from its final hidden states: logits are never stored.

What RL needs of a token's distribution over the vocabulary are a few numbers: the log-probability of the token, the
log-sum-exp, the entropy and the KL divergence to a reference's distribution. All are sums over the vocabulary of
functions of the logits, so one pass over tiles of the head's columns gives them (the online
softmax of flash attention; for a loss, Wijmans et al. 2024, arXiv 2411.09009), and a second one their gradients,
computing the logits again. Sums are float32, tiles ascending by word.

A distribution that was truncated by top-p, top-k or min-p is that of its candidates, renormalised: logits of other
words count for nothing, in every sum and gradient.

The words of a head are passed over by XLA, as a scan over tiles. Where devices share the words, each goes through its
own, and their sums are merged in the order of the words.

Shape letters: as in sums.py.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.kernels.policy_head.sums import (
    NEVER,
    HeadRules,
    Statistics,
    Sums,
    d_products,
    merge_shards,
    statistics_of,
)
from mesh.sharding import vary, varying


class HeadInputs(NamedTuple):
    """Arrays of a pass."""

    x: Any  # final hidden states [n, d]
    weight: Any  # the head [d, v], or this device's part of its words
    targets: Any  # int32 [n]
    reference: Any = None  # hidden states and head of another policy, likewise; or None
    candidates: Any = None  # int32 [n, k], the words that have a probability, -1 for none; None: all have


class Words(NamedTuple):
    """Settings of a pass; static."""

    rules: HeadRules  # rules of the policy's head
    other: HeadRules  # rules of the reference's
    axes: tuple[str, ...] = ()  # mesh axes of the shard_map around this over which the words are sharded


class Found(NamedTuple):
    """Results of a forward pass: sums, and the reference's log-sum-exps [n, 1]."""

    sums: Sums
    normaliser: Any


def _sums(words: Words, tokens: HeadInputs) -> Found:
    """Return the results over all words, the same on every device that shares them."""

    def add(carry: Any, start: Any, size: int) -> Any:
        sums, others = carry
        names, logits, logits_of_other = _tile(words, tokens, start, size)
        if logits_of_other is not None:
            others = others.add(logits_of_other, jnp.zeros_like(logits, bool))
        return sums.add(logits, names == tokens.targets[:, None], logits_of_other), others

    axes, empty = _varying(tokens), Sums.empty((len(tokens.x), 1))
    begin = jax.tree.map(lambda part: vary(part, axes), (empty, empty))
    sums, others = _over_tiles(add, begin, tokens.weight.shape[1], words.rules.tile)
    if words.axes:
        sums, others = map(merge_shards, _from_shards((sums, others), words.axes))
    normaliser = None if tokens.reference is None else others.peak + jnp.log(others.total)
    return Found(sums, normaliser)


def _gradients(words: Words, tokens: HeadInputs, normaliser: Any, columns: Any) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of hidden states and head; `columns` [n, 1]: the statistics, and their cotangents."""
    x, weight = tokens.x, tokens.weight

    def add(carry: Any, start: Any, size: int) -> Any:
        d_x, d_weight = carry
        names, logits, other = _tile(words, tokens, start, size)
        logprobs = None if other is None else other - normaliser
        d = d_products(logits, names == tokens.targets[:, None], columns, words.rules, logprobs).astype(x.dtype)
        head = jax.lax.dynamic_slice_in_dim(weight, start, size, axis=1)
        d_x = d_x + jax.lax.dot_general(d, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        d_head = jax.lax.dot_general(x, d, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return d_x, jax.lax.dynamic_update_slice_in_dim(d_weight, d_head.astype(d_weight.dtype), start, axis=1)

    axes = _varying(tokens)
    begin = vary(jnp.zeros(x.shape, jnp.float32), axes), vary(jnp.zeros_like(weight), axes)
    d_x, d_weight = _over_tiles(add, begin, weight.shape[1], words.rules.tile)
    d_x = jax.lax.psum(d_x, words.axes) if words.axes else d_x
    return d_x.astype(x.dtype), d_weight


def _over_tiles(add: Callable[[Any, Any, int], Any], begin: Any, words: int, tile: int) -> Any:
    """Return `add(carry, start, words of the tile)` over all tiles; the last has what is left: nothing is padded."""
    count, rest = divmod(words, tile)
    if not count:
        return add(begin, 0, rest)
    carry, _ = jax.lax.scan(lambda carry, start: (add(carry, start, tile), None), begin, jnp.arange(count) * tile)
    return add(carry, count * tile, rest) if rest else carry


def _tile(words: Words, tokens: HeadInputs, start: Any, size: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the ids of a tile's words [1, w], and scaled logits [n, w] of the policy and of the reference."""
    names = start + jnp.arange(size, dtype=jnp.int32)[None]
    if words.axes:
        names = names + jax.lax.axis_index(words.axes) * tokens.weight.shape[1]
    kept = None
    if tokens.candidates is not None:
        kept = jnp.any(tokens.candidates[..., None] == names, axis=-2)

    def logits(rules: HeadRules, x: jax.Array, weight: jax.Array) -> jax.Array:
        columns = jax.lax.dynamic_slice_in_dim(weight, start, size, axis=1)
        found = rules.logits(jnp.dot(x, columns, preferred_element_type=jnp.float32))
        return found if kept is None else jnp.where(kept, found, NEVER)

    other = None if tokens.reference is None else logits(words.other, *tokens.reference)
    return names, logits(words.rules, tokens.x, tokens.weight), other


def _varying(tokens: HeadInputs) -> frozenset[str]:
    """Return the axes over which what is made of these arrays varies."""
    return functools.reduce(frozenset.union, map(varying, jax.tree.leaves(tokens)), frozenset())


def _from_shards(tree: Any, axes: tuple[str, ...]) -> Any:
    """Return the arrays of all devices along these axes, stacked in their order; each then has the same."""
    count, own = jax.lax.axis_size(axes), jax.lax.axis_index(axes)

    def gathered(x: jax.Array) -> jax.Array:  # a sum of which all but one term is zero, and which is known to be equal
        places = jnp.arange(count).reshape(count, *[1] * x.ndim)
        return jax.lax.psum(jnp.where(places == own, x[None], jnp.zeros((), x.dtype)), axes)

    return jax.tree.map(gathered, tree)


class OtherPolicy(NamedTuple):
    """Another policy's hidden states [n, width] of the same tokens, its head [width, v], and the rules of that."""

    x: Any
    weight: Any
    rules: HeadRules


def policy_statistics(
    x_nd: jax.Array,
    weight_dv: jax.Array,
    targets_n: jax.Array,
    rules: HeadRules,
    reference: OtherPolicy | None = None,
    *,
    candidates: jax.Array | None = None,
    axes: tuple[str, ...] = (),
) -> Statistics:
    """Return the statistics of each token's distribution, differentiable in `x` and `weight`.

    Args:
        x_nd: final hidden states.
        weight_dv: the head, in the type of x; products are summed in float32.
        targets_n: int32.
        rules: temperature, soft cap, sizes of tiles.
        reference: another policy over the same words and candidates; no gradient.
        candidates: int32 [n, k], the words that each distribution is over, -1 for none; None: all words.
        axes: mesh axes of the shard_map around this over which the words are sharded; the result is the same on all of
            these devices, as must be `x`, targets and candidates.
    """
    words = Words(rules, rules if reference is None else reference.rules, axes)
    tokens = HeadInputs(x_nd, weight_dv, targets_n, None if reference is None else reference[:2], candidates)
    found = _statistics(words, tokens)
    return found if reference is not None else found._replace(kl=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(words: Words, tokens: HeadInputs) -> Statistics:
    return _forward(words, tokens)[0]


def _forward(words: Words, tokens: HeadInputs) -> tuple[Statistics, Any]:
    sums, normaliser = _sums(words, tokens)
    found = statistics_of(sums, normaliser)
    return found, (tokens, normaliser, found)


def _backward(words: Words, saved: Any, cotangents: Statistics) -> Any:
    tokens, normaliser, found = saved
    columns = [part[:, None] for part in (*found[:4], *cotangents[:4])]
    d_x, d_weight = _gradients(words, tokens, normaliser, columns)
    return (HeadInputs(d_x, d_weight, None, jax.tree.map(jnp.zeros_like, tokens.reference), None),)


_statistics.defvjp(_forward, _backward)
