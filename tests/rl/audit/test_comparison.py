"""Drawings of a rollout are compared to the bit, or by what rounding can explain."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.audit.comparison import Rounding, first_difference, reward_difference
from rl.protocol.messages import Rollout, Score
from rl.rollout.decoding.drawing import draw, row_keys
from tests.rl.tiny import make_prompt, make_rollout

ONE = make_rollout(make_prompt(7), 2, [5, 9, 4, 9])
VOCAB = 50


def changed(name: str, position: int, value: Any) -> Rollout:
    array = getattr(ONE, name).copy()
    array[position] = value
    return dataclasses.replace(ONE, **{name: array})


def ulp(value: float) -> np.float32:
    return np.nextafter(np.float32(value), np.float32(0))


@pytest.mark.parametrize(
    ("other", "what", "position"),
    [
        (changed("tokens", 3, 8), "tokens", 3),
        (changed("logprobs", 1, ulp(-2.0)), "log-probabilities", 1),
        (changed("logprobs", 1, np.nan), "log-probabilities", 1),
        (changed("versions", 0, 1), "versions", 0),
        (changed("action_mask", 2, False), "actions", 2),
        (make_rollout(make_prompt(7), 2, [5, 9, 4]), "tokens", 3),
        (dataclasses.replace(ONE, finish_reason="length"), "end", None),
        (dataclasses.replace(ONE, logprobs=ONE.logprobs[:2]), "log-probabilities", 0),
        (dataclasses.replace(ONE, logprobs=ONE.logprobs.astype(np.float64)), "log-probabilities", 0),
    ],
)
def test_the_first_difference_is_named(other: Rollout, what: str, position: int | None) -> None:
    assert first_difference(ONE, dataclasses.replace(ONE)) is None
    for found in (first_difference(other, ONE), first_difference(ONE, other)):
        assert found is not None and (found.what, found.position) == (what, position)


def test_rewards_differ_where_the_verifier_could_give_both() -> None:
    found = reward_difference(Score(1.0), Score(0.5))
    assert str(found) == "reward: 1.0, drawn again 0.5"
    assert reward_difference(Score(1.0), Score(0.0, "timeout")) is None


def drawn(logits: np.ndarray, rounding: Rounding, sample: int) -> Rollout:
    """Draw as an engine does: the largest of log-probability plus the key's noise, in float64."""
    wide = logits.astype(np.float64)
    logprobs = (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32)
    noise = [rounding.noise(7, sample, position) for position in range(len(logits))]
    tokens = [int(np.argmax(row + of)) for row, of in zip(logprobs.astype(np.float64), noise, strict=True)]
    made = make_rollout(make_prompt(7), sample, tokens)
    return dataclasses.replace(made, logprobs=logprobs[np.arange(len(tokens)), tokens])


@pytest.mark.slow
def test_another_processors_rounding_is_no_difference_and_more_is() -> None:
    rng = np.random.default_rng(0)
    rounding, flips = Rounding(bound=0.05, seed=3, vocab=VOCAB), 0
    caught = 0
    for sample in range(40):
        logits = rng.normal(size=(32, VOCAB)).astype(np.float32)
        one = drawn(logits, rounding, sample)
        # A bound on logits bounds log-probabilities by its double.
        other = drawn(logits + rng.uniform(-0.024, 0.024, logits.shape).astype(np.float32), rounding, sample)
        assert first_difference(one, other) is not None
        assert first_difference(one, other, rounding) is None
        flips += not np.array_equal(one.tokens, other.tokens)
        cheap = drawn(logits + rng.uniform(-2, 2, logits.shape).astype(np.float32), rounding, sample)
        caught += first_difference(cheap, one, rounding) is not None
        liar = dataclasses.replace(one, tokens=np.where(np.arange(32) == 5, (one.tokens + 1) % VOCAB, one.tokens))
        found = first_difference(liar, one, rounding)
        assert found is not None and (found.what, found.position) == ("tokens", 5)
    assert caught >= 36, "a cheaper model escapes only where its first other token is a near tie"
    assert flips > 3, "near ties that rounding decides must have occurred"


def test_a_token_that_does_not_exist_is_a_difference_and_no_error() -> None:
    rounding = Rounding(bound=0.05, seed=3, vocab=VOCAB)
    for token in (-1, VOCAB, 2**31 - 1):
        found = first_difference(changed("tokens", 1, token), ONE, rounding)
        assert found is not None and found.what == "tokens"


@pytest.mark.slow
def test_the_noise_is_that_of_the_sampler() -> None:
    logits = np.random.default_rng(1).normal(size=(9, VOCAB)).astype(np.float32)
    key = row_keys(jnp.asarray([[3, 1, 7, 2]], jnp.uint32))[0]
    tokens, _ = draw(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(9)), jnp.asarray(logits))
    rounding = Rounding(bound=0.0, seed=3, vocab=VOCAB)
    noise = [rounding.noise((1 << 32) + 7, 2, position) for position in range(9)]
    assert tokens.tolist() == [int(np.argmax(row + of)) for row, of in zip(logits, noise, strict=True)]
