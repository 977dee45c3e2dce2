"""The statistics of a policy's distributions from its final hidden states: logits are never stored.

What RL needs of a token's distribution over the vocabulary are a few numbers: the log-probability of the token, the
log-sum-exp, the entropy, the KL divergence to a reference's distribution, and the likeliest words. All but the last are
sums over the vocabulary of functions of the logits, so one pass over tiles of the head's columns gives them (the online
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
from mesh.errors import UserError


class OtherPolicy(NamedTuple):
    """Another policy's hidden states [n, width] of the same tokens, its head [width, v], and the rules of that."""

    x: Any
    weight: Any
    rules: HeadRules


class _Pass(NamedTuple):
    words: Words
    kernel: bool
    interpret: bool


def policy_statistics(
    x_nd: jax.Array,
    weight_dv: jax.Array,
    targets_n: jax.Array,
    rules: HeadRules,
    reference: OtherPolicy | None = None,
    *,
    candidates: jax.Array | None = None,
    top: int = 0,
    axes: tuple[str, ...] = (),
    kernel: bool = False,
    interpret: bool = False,
) -> Statistics:
    """Return the statistics of each token's distribution, differentiable in `x` and `weight` (the likeliest words not).

    Args:
        x_nd: final hidden states.
        weight_dv: the head, in the type of x; products are summed in float32.
        targets_n: int32.
        rules: temperature, soft cap, sizes of tiles.
        reference: another policy over the same words and candidates; no gradient.
        candidates: int32 [n, k], the words that each distribution is over, -1 for none; None: all words.
        top: how many of the likeliest words are returned, of equals those of smaller ids; v or fewer.
        axes: mesh axes of the shard_map around this over which the words are sharded; the result is the same on all of
            these devices, as must be `x`, targets and candidates.
        kernel: by the kernels for TPUs, for log-probability and entropy over all words on one device.
        interpret: simulate a TPU, which is slow; for tests.

    Raises:
        UserError: with the kernels, something that they do not have.
    """
    if kernel and (reference is not None or candidates is not None or top or axes):
        raise UserError(
            "policy head: the kernels for TPUs take no reference, no candidates and no shards of words, and find no "
            "likeliest words; expected kernel=False"
        )
    other = rules if reference is None else reference.rules
    how = _Pass(Words(rules, other, axes, top), kernel, interpret)
    tokens = HeadInputs(x_nd, weight_dv, targets_n, None if reference is None else reference[:2], candidates)
    found = _statistics(how, tokens)
    return found if reference is not None else found._replace(kl=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(how: _Pass, tokens: HeadInputs) -> Statistics:
    return _forward(how, tokens)[0]


def _forward(how: _Pass, tokens: HeadInputs) -> tuple[Statistics, Any]:
    if how.kernel:
        from axlearn_like.kernels.policy_head.tpu import forward  # Pallas, for TPUs alone

        x, weight, targets = tokens[:3]
        sums, normaliser, top = forward(x, weight, targets, how.words.rules, interpret=how.interpret), None, None
    else:
        sums, normaliser, top = scan.forward(how.words, tokens)
    found = statistics_of(sums, normaliser)
    return found._replace(top=top), (tokens, normaliser, found)


def _backward(how: _Pass, saved: Any, cotangents: Statistics) -> Any:
    tokens, normaliser, found = saved
    columns = [part[:, None] for part in (*found[:4], *cotangents[:4])]
    if how.kernel:
        from axlearn_like.kernels.policy_head.tpu import backward

        x, weight, targets = tokens[:3]
        d_x, d_weight = backward(x, weight, targets, columns, how.words.rules, interpret=how.interpret)
    else:
        d_x, d_weight = scan.backward(how.words, tokens, normaliser, columns)
    return (HeadInputs(d_x, d_weight, None, jax.tree.map(jnp.zeros_like, tokens.reference), None),)


_statistics.defvjp(_forward, _backward)
