"""The statistics of a policy's distributions from its final hidden states: logits are never stored.

What RL needs of a token's distribution over the vocabulary are a few numbers: the log-probability of the token, the
log-sum-exp, the entropy and the KL divergence to a reference's distribution. All are sums over the vocabulary of
functions of the logits, so one pass over tiles of the head's columns gives them (the online
softmax of flash attention; for a loss, Wijmans et al. 2024, arXiv 2411.09009), and a second one their gradients,
computing the logits again. Sums are float32, tiles ascending by word.

A distribution that was truncated by top-p, top-k or min-p is that of its candidates, renormalised: logits of other
words count for nothing, in every sum and gradient.

Shape letters: as in sums.py.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.kernels.policy_head import scan
from axlearn_like.kernels.policy_head.scan import HeadInputs, Words
from axlearn_like.kernels.policy_head.sums import HeadRules, Statistics, statistics_of


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
    sums, normaliser = scan.forward(words, tokens)
    found = statistics_of(sums, normaliser)
    return found, (tokens, normaliser, found)


def _backward(words: Words, saved: Any, cotangents: Statistics) -> Any:
    tokens, normaliser, found = saved
    columns = [part[:, None] for part in (*found[:4], *cotangents[:4])]
    d_x, d_weight = scan.backward(words, tokens, normaliser, columns)
    return (HeadInputs(d_x, d_weight, None, jax.tree.map(jnp.zeros_like, tokens.reference), None),)


_statistics.defvjp(_forward, _backward)
