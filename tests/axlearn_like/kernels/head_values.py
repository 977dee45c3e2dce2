"""Values of the policy's head in tiles of words, with what is right in float64."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.policy_head.statistics import OtherPolicy, policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules
from tests.axlearn_like.kernels.paged_attention.values import Pairs

_NEVER = -1e30


def head(
    *,
    words: int,
    width: int = 16,
    tokens: int = 10,
    soft_cap: float | None = None,
    kept: int | None = None,
    other: int | None = None,
    shards: int | None = None,
) -> Pairs:
    """Log-probabilities and entropies, and the gradients of a random mixture of them.

    Args:
        words: words of the vocabulary.
        width: width of the hidden states.
        tokens: tokens.
        soft_cap: cap of the logits.
        kept: candidate words of each token at most; of the first token it is one. None: all.
        other: width of a reference, whose KL divergence is in the mixture; None: there is none.
        shards: devices that share the words, simulated; None: there is one.
    """
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((tokens, width)), 0.3 * rng.standard_normal((width, words))
    targets, mixed = rng.integers(0, words, tokens).astype(np.int32), rng.standard_normal((3, tokens))
    rules = HeadRules(temperature=0.8, soft_cap=soft_cap, tile=2048 if words > 9999 else 128)
    candidates = None if kept is None else _candidates(rng, words, targets, kept)
    wide = other or 0
    reference = rng.standard_normal((tokens, wide)), 0.3 * rng.standard_normal((wide, words))
    arrays, case = (x, weight, *reference), _Case(rules, targets, mixed, candidates, compared=other is not None)

    ours = functools.partial(case.ours, sharded=shards is not None)
    run = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)
    given = [jnp.asarray(one, jnp.float32) for one in arrays]
    if shards is None:
        (_, found), gradients = run(*given)
    else:
        (_, each), (d_x, d_weight) = _on_shards(run, shards, given)
        found, gradients = [one[-1] for one in each], (d_x[-1], d_weight)
    found = [np.asarray(one) for one in (*found, *gradients)]
    with jax.enable_x64(True):
        given = [jnp.asarray(one, jnp.float64) for one in arrays]
        (_, right), gradients = jax.value_and_grad(case.plain, argnums=(0, 1), has_aux=True)(*given)
        right = [np.asarray(one) for one in (*right, *gradients)]
    return list(zip(found, right, strict=True))


class _Case(NamedTuple):
    """A head's rules and constants; `compared`: with a reference."""

    rules: HeadRules
    targets: np.ndarray
    mixed: np.ndarray
    candidates: np.ndarray | None
    compared: bool

    def ours(self, x: Any, weight: Any, other_x: Any, other_weight: Any, *, sharded: bool) -> Any:
        """Return the mixture and its parts in tiles of words."""
        found = policy_statistics(
            x,
            weight,
            jnp.asarray(self.targets),
            self.rules,
            OtherPolicy(other_x, other_weight, self.rules) if self.compared else None,
            candidates=None if self.candidates is None else jnp.asarray(self.candidates),
            axes=("words",) if sharded else (),
        )
        return self._mixture((found.logprob, found.entropy, *((found.kl,) if self.compared else ())))

    def plain(self, x: Any, weight: Any, other_x: Any, other_weight: Any) -> Any:
        """Return the same of whole logits."""
        own = self._logprobs(x, weight)
        chosen = jnp.take_along_axis(own, self.targets[:, None], axis=-1)[:, 0]
        found = (chosen, -jnp.sum(jnp.exp(own) * own, axis=-1))
        if self.compared:
            found += (jnp.sum(jnp.exp(own) * (own - self._logprobs(other_x, other_weight)), axis=-1),)
        return self._mixture(found)

    def _logprobs(self, x: Any, weight: Any) -> jax.Array:
        logits = self.rules.logits(x @ weight)
        if self.candidates is not None:
            logits = jnp.where((self.candidates[..., None] == np.arange(logits.shape[-1])).any(-2), logits, _NEVER)
        return jax.nn.log_softmax(logits, axis=-1)

    def _mixture(self, found: Any) -> Any:
        return sum(jnp.sum(weights * one) for weights, one in zip(self.mixed, found, strict=False)), found


def _candidates(rng: np.random.Generator, words: int, targets: np.ndarray, kept: int) -> np.ndarray:
    """Return words that a sampler may have kept, the target among them; -1 where there are fewer."""
    others = np.sort(rng.random((len(targets), words)).argsort(axis=-1)[:, : kept - 1], axis=-1)
    found = np.concatenate([others, targets[:, None]], axis=-1).astype(np.int32)
    found[0, :-1] = -1
    return found


def _on_shards(run: Callable[..., Any], shards: int, arrays: Any) -> Any:
    """Return the results of every device of a simulated axis, which have all tokens and part of the words each.

    The gradient of the head is put together.
    """
    x, weight, other_x, other_weight = arrays
    parts = [jnp.stack(jnp.split(one, shards, axis=1)) for one in (weight, other_weight)]
    mapped = jax.vmap(run, in_axes=(None, 0, None, 0), axis_name="words")
    values, (d_x, d_weight) = mapped(x, parts[0], other_x, parts[1])
    return values, (d_x, jnp.concatenate(list(d_weight), axis=1))
