"""Losses by name, with the formulas, inputs and numbers that Tinker documents: sums over the tokens of a row.

All are functions of the log-probability p of a token's target, of the sampler's log-probability q, and of an advantage
A, with r = exp(p - q):

    cross_entropy        -p w
    importance_sampling  -r A
    ppo                  -min(r A, clip(r) A)
    cispo                -sg[clip(r)] p A                      (arXiv 2506.13585)
    dro                  -(p A - beta / 2 (p - q)^2)           (arXiv 2405.19107)
    gspo                 -min(s A, clip(s) A)                  (arXiv 2507.18071)

where s is the geometric mean of r over the row's tokens under `sequence_ratio_mask`, with the gradient of the token
itself (its eq. 13, GSPO-token): for one advantage a row this sums to the gradient of s times the number of tokens.

Cross entropy may have several targets a token, each with its weight: its sum is over these, too.

Rows of several losses are computed in one program: a few numbers for each token, beside a model, cost nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from mesh.errors import did_you_mean
from rl.serving.service.messages import Datum, LossName, ServiceError

Arrays = Mapping[str, jax.Array]  # float32 [rows, length] of `NAMES`
TokenLoss = Callable[[jax.Array, Arrays], jax.Array]


@dataclasses.dataclass(frozen=True)
class NamedLoss:
    """A loss, what it takes, and its numbers."""

    # Function of log-probabilities [rows, length] and arrays; zero in all of them means that a token does not count
    of_tokens: TokenLoss
    inputs: tuple[str, ...]  # required inputs of a datum beside `target_tokens`
    # Inputs that may be there; without them they follow from the numbers or the other inputs
    optional: tuple[str, ...] = ()
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)  # settings with their defaults


def _cross_entropy(logprobs: jax.Array, arrays: Arrays) -> jax.Array:
    return -logprobs * arrays["weights"]


def _importance_sampling(logprobs: jax.Array, arrays: Arrays) -> jax.Array:
    return -jnp.exp(logprobs - arrays["logprobs"]) * arrays["advantages"]


def _ppo(logprobs: jax.Array, arrays: Arrays) -> jax.Array:
    return _clipped(jnp.exp(logprobs - arrays["logprobs"]), arrays)


def _cispo(logprobs: jax.Array, arrays: Arrays) -> jax.Array:
    ratio = _limited(jnp.exp(logprobs - arrays["logprobs"]), arrays)
    return -jax.lax.stop_gradient(ratio) * logprobs * arrays["advantages"]


def _dro(logprobs: jax.Array, arrays: Arrays) -> jax.Array:
    away = logprobs - arrays["logprobs"]
    return -(logprobs * arrays["advantages"] - 0.5 * arrays["beta"] * away * away)


def _gspo(logprobs: jax.Array, arrays: Arrays) -> jax.Array:
    mask = arrays["sequence_ratio_mask"]
    total = jnp.sum(mask * (logprobs - arrays["logprobs"]), axis=-1, keepdims=True)
    mean = jax.lax.stop_gradient(total / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1.0))
    return _clipped(jnp.exp(mean + (logprobs - jax.lax.stop_gradient(logprobs))), arrays)


def _limited(ratio: jax.Array, arrays: Arrays) -> jax.Array:
    return jnp.clip(ratio, arrays["clip_low_threshold"], arrays["clip_high_threshold"])


def _clipped(ratio: jax.Array, arrays: Arrays) -> jax.Array:
    advantages = arrays["advantages"]
    return -jnp.minimum(ratio * advantages, _limited(ratio, arrays) * advantages)


_CLIP = ("clip_low_threshold", "clip_high_threshold")
_DRAWN = ("logprobs", "advantages")

LOSSES: Mapping[LossName, NamedLoss] = {
    "cross_entropy": NamedLoss(_cross_entropy, ("weights",)),
    "importance_sampling": NamedLoss(_importance_sampling, _DRAWN),
    "ppo": NamedLoss(_ppo, _DRAWN, _CLIP, dict(zip(_CLIP, (0.8, 1.2), strict=True))),
    "cispo": NamedLoss(_cispo, _DRAWN, _CLIP, dict(zip(_CLIP, (0.0, 4.0), strict=True))),
    "dro": NamedLoss(_dro, _DRAWN, (), {"beta": 0.05}),
    "gspo": NamedLoss(
        _gspo, _DRAWN, (*_CLIP, "sequence_ratio_mask"), dict(zip(_CLIP, (1 - 3e-4, 1 + 4e-4), strict=True))
    ),
}
assert tuple(LOSSES) == get_args(LossName)
NUMBERS: Mapping[LossName, int] = {name: number for number, name in enumerate(LOSSES)}
MOST_TARGETS = 64  # limit for a token
NAMES = ("weights", *_DRAWN, *_CLIP, "sequence_ratio_mask", "beta")


def token_losses(kinds: jax.Array, logprobs: jax.Array, arrays: Arrays, live: jax.Array) -> jax.Array:
    """Return the losses of tokens, float32 [rows, length], 0 where they are not live; pure, to be traced.

    Args:
        kinds: int32 [rows], the number of each row's loss (`NUMBERS`).
        logprobs: float32 [rows, length], log-probabilities of the targets.
        arrays: float32 [rows, length] by the names of `NAMES`, see `loss_arrays`; anything where a token is not live.
        live: bool [rows, length].
    """
    total = jnp.zeros_like(logprobs)
    for name, number in NUMBERS.items():
        own = live & (kinds == number)[:, None]
        # Zeros into the losses that a row does not have: their exponentials could be infinite, times 0 in the gradient.
        inputs = {key: jnp.where(own, value, 0.0) for key, value in arrays.items()}
        found = LOSSES[name].of_tokens(jnp.where(own, logprobs, 0.0), inputs)
        total += jnp.where(own, found, 0.0)
    return total


def target_losses(logprobs: jax.Array, weights: jax.Array, live: jax.Array) -> jax.Array:
    """Return the cross entropies of tokens with several targets, float32 [rows, length]; pure, to be traced.

    Args:
        logprobs: float32 [rows, length, targets].
        weights: the same; 0 for targets that are not there.
        live: bool [rows, length].
    """
    own = jnp.where(live[..., None], logprobs, 0.0)
    return jnp.sum(jnp.where(live[..., None], _cross_entropy(own, {"weights": weights}), 0.0), axis=-1)


def loss_numbers(loss: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Return a loss's numbers, with its defaults (ServiceError: no such loss or setting, or no number for it)."""
    if (named := next((value for name, value in LOSSES.items() if name == loss), None)) is None:
        raise ServiceError(f"there is no loss {loss!r}{did_you_mean(loss, LOSSES)}")
    numbers = dict(named.numbers)
    for key, value in config.items():
        if key not in numbers:
            near = did_you_mean(key, numbers) or "; it has none"
            raise ServiceError(f"{loss} has no setting {key!r}{near}")
        if isinstance(value, str) or not np.isfinite(value):
            raise ServiceError(f"{loss}.{key}: got {value!r}; expected a number")
        numbers[key] = float(value)
    low, high = (numbers.get(key, 0.0) for key in _CLIP)
    if low > high:
        raise ServiceError(f"{loss}: clip_low_threshold={low} is above clip_high_threshold={high}")
    return numbers


def loss_arrays(loss: LossName, numbers: Mapping[str, float], datum: Datum, which: str) -> dict[str, np.ndarray]:
    """Return the arrays of a row, float32 [length] by name, for `token_losses`; those without a value are not there.

    With several targets a token there are `weights` alone, [length, targets], for `target_losses`.

    Args:
        numbers: those of `loss_numbers`.
        datum: the row; of its targets, only the shape is looked at.
        which: name of the row, for errors.

    Raises:
        ServiceError: an input is missing, is of another loss, has another length, or is not all numbers.
    """
    named, length = LOSSES[loss], len(datum.tokens)
    known = ("target_tokens", *named.inputs, *named.optional)
    for name in ("target_tokens", *named.inputs):
        if name not in datum.inputs:
            raise ServiceError(f"{which}: {loss} needs {name}; got {', '.join(sorted(datum.inputs)) or 'no inputs'}")
    targets = datum.inputs["target_tokens"]
    several = targets.ndim == 2 and loss == "cross_entropy"
    shape = (length, *targets.shape[1:]) if several else (length,)
    said = f"one for each token{' and target' if several else ''}"
    if several and not 0 < targets.shape[1] <= MOST_TARGETS:
        raise ServiceError(f"{which}: target_tokens has {targets.shape[1]} a token; expected 1 to {MOST_TARGETS}")
    for name, values in datum.inputs.items():
        if name not in known:
            raise ServiceError(f"{which}: {loss} takes no input {name!r}{did_you_mean(name, known)}")
        if values.shape != shape:
            raise ServiceError(f"{which}: {name} has shape {values.shape}; expected {shape}, {said}")
        if len(wrong := np.argwhere(~np.isfinite(values))):
            at, got = ", ".join(map(str, wrong[0])), values[tuple(wrong[0])]
            raise ServiceError(f"{which}: {name}[{at}] is {got}; expected a number")
    if several:
        return {"weights": np.asarray(datum.inputs["weights"], np.float32)}
    arrays = {name: np.full(length, number, np.float32) for name, number in numbers.items()}
    if "sequence_ratio_mask" in named.optional:  # tokens of the prompt have no advantage, and the sampler drew none
        arrays["sequence_ratio_mask"] = (datum.inputs["advantages"] != 0).astype(np.float32)
    given = {name: np.asarray(values, np.float32) for name, values in datum.inputs.items() if name != "target_tokens"}
    return arrays | given
