"""The statistics of a policy's head from whole logits in float64: what those in tiles are compared with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.policy_head.sums import HeadRules

NAMES = ("logprob", "logsumexp", "entropy", "kl")


def whole_statistics(
    x: Any, weight: Any, targets: Any, rules: HeadRules, reference: Any = None, candidates: Any = None
) -> dict[str, Any]:
    """Return the statistics by name; `reference`: hidden states, head, rules; `candidates`: [n, k], -1 for none."""

    def logits(x: Any, weight: Any, rules: HeadRules) -> Any:
        capped = x @ weight
        if rules.soft_cap is not None:
            capped = rules.soft_cap * jnp.tanh(capped / rules.soft_cap)
        if candidates is None:
            return capped / rules.temperature
        kept = (candidates[..., None] == np.arange(weight.shape[1])).any(-2)
        return jnp.where(kept, capped / rules.temperature, -1e30)

    own = logits(x, weight, rules)
    logprobs = jax.nn.log_softmax(own, axis=-1)
    share = jnp.exp(logprobs)
    found = {
        "logprob": jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0],
        "logsumexp": jax.nn.logsumexp(own, axis=-1),
        "entropy": -jnp.sum(share * logprobs, axis=-1),
    }
    if reference is not None:
        other = jax.nn.log_softmax(logits(*reference), axis=-1)
        found["kl"] = jnp.sum(share * (logprobs - other), axis=-1)
    return found


def with_gradients(compute: Any, mixed: Any, *inputs: Any) -> tuple[dict[str, Any], Any]:
    """Return what `compute(*inputs)` finds, and the gradients of a mixture of it: `mixed` by name."""

    def loss(*inputs: Any) -> Any:
        found = compute(*inputs)
        return sum(jnp.sum(mixed[name] * one) for name, one in found.items() if name in mixed), found

    (_, found), gradients = jax.value_and_grad(loss, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)
    return found, gradients


def in_float64(compute: Any, mixed: Any, *inputs: Any) -> Any:
    """Return the same of inputs in float64, as numpy arrays; `compute` must not round."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(one, jnp.float64) for one in inputs]
        return jax.tree.map(np.asarray, with_gradients(compute, mixed, *wide))


def by_name(found: Any) -> dict[str, Any]:
    """Return the differentiable statistics that there are."""
    return {name: getattr(found, name) for name in NAMES if getattr(found, name) is not None}
