"""The statistics of a policy's distributions from its final hidden states: logits are never stored.

What RL needs of a token's distribution over the vocabulary are a few numbers: the log-probability of the token, the
log-sum-exp, the entropy, and the KL divergence to a reference's distribution. All are sums over the vocabulary of
functions of the logits, so one pass over tiles of the head's columns gives them (the online softmax of flash attention;
for a loss, Wijmans et al. 2024, arXiv 2411.09009), and a second one their gradients, computing the logits again. Sums
are float32, tiles ascending by word.

Shape letters: as in sums.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.policy_head import scan
from axlearn_like.kernels.policy_head.sums import HeadRules, Statistics, statistics_of
from mesh.errors import UserError


def policy_statistics(
    x_nd: jax.Array,
    weight_dv: jax.Array,
    targets_n: jax.Array,
    rules: HeadRules,
    reference: tuple[jax.Array, jax.Array] | None = None,
    *,
    kernel: bool = False,
    interpret: bool = False,
) -> Statistics:
    """Return the statistics of each token's distribution, differentiable in `x` and `weight`.

    Args:
        x_nd: final hidden states.
        weight_dv: the head, in the type of x; products are summed in float32.
        targets_n: int32.
        rules: temperature, soft cap, sizes of tiles.
        reference: hidden states and head of another policy for these tokens, under the same rules; no gradient.
        kernel: by the kernels for TPUs, which take no reference.
        interpret: simulate a TPU, which is slow; for tests.

    Raises:
        UserError: a reference, with the kernels.
    """
    if kernel and reference is not None:
        raise UserError("policy head: the kernels for TPUs take no reference; expected kernel=False")
    found = _statistics(rules, kernel, interpret, x_nd, weight_dv, targets_n, reference)
    return found if reference is not None else found._replace(kl=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _statistics(
    rules: HeadRules, kernel: bool, interpret: bool, x: jax.Array, weight: jax.Array, targets: jax.Array, reference: Any
) -> Statistics:
    return _forward(rules, kernel, interpret, x, weight, targets, reference)[0]


def _forward(
    rules: HeadRules, kernel: bool, interpret: bool, x: jax.Array, weight: jax.Array, targets: jax.Array, reference: Any
) -> tuple[Statistics, Any]:
    if kernel:
        from axlearn_like.kernels.policy_head.tpu import forward  # Pallas, for TPUs alone

        sums, normaliser = forward(x, weight, targets, rules, interpret=interpret), None
    else:
        sums, normaliser = scan.forward(rules, x, weight, targets, reference)
    found = statistics_of(sums, normaliser)
    return found, (x, weight, targets, reference, normaliser, found)


def _backward(rules: HeadRules, kernel: bool, interpret: bool, saved: Any, cotangents: Statistics) -> Any:
    x, weight, targets, reference, normaliser, found = saved
    columns = [part[:, None] for part in (*found, *cotangents)]
    if kernel:
        from axlearn_like.kernels.policy_head.tpu import backward

        d_x, d_weight = backward(x, weight, targets, columns, rules, interpret=interpret)
    else:
        d_x, d_weight = scan.backward(rules, x, weight, targets, reference, normaliser, columns)
    return d_x, d_weight, None, jax.tree.map(jnp.zeros_like, reference)


_statistics.defvjp(_forward, _backward)
