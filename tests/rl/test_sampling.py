"""What is drawn follows the stated distribution, is scored under it, and depends on the request alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mesh import UserError
from rl.sampling import Sampler, at_position, sample_keys

VOCAB = 12
LOGITS = np.random.default_rng(5).normal(0.0, 1.5, VOCAB).astype(np.float32)
PROMPTS, SAMPLES, POSITIONS = 25, 40, 20


def keys_of(seed: int, prompts: list[int], samples: int, position: int) -> jax.Array:
    halves = np.array([[p >> 32, p & 0xFFFFFFFF] for p in prompts], np.uint32)
    return at_position(sample_keys(jnp.uint32(seed), jnp.asarray(halves), samples), jnp.int32(position))


def expected(temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> np.ndarray:
    """The distribution as the text-book has it, in float64: [vocab]."""
    logits = LOGITS.astype(np.float64)
    if temperature == 0:
        return np.eye(VOCAB)[np.argmax(logits)]
    p = np.exp(logits / temperature)
    order = np.argsort(-p)
    if top_k is not None:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        nucleus = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        p[order[nucleus:]] = 0
    return p / p.sum()


@pytest.fixture(scope="module")
def keys() -> jax.Array:
    """Of many prompts, samples and positions: [prompts, samples * positions]."""
    return jnp.concatenate([keys_of(3, list(range(PROMPTS)), SAMPLES, i) for i in range(POSITIONS)], axis=1)


def draws(sampler: Sampler, keys: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """A token and its log-probability for each key. Not jitted: so all samplers share one compiled draw."""
    tokens, logprobs = sampler.draw(keys, jnp.broadcast_to(LOGITS, (*keys.shape, VOCAB)))
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.6},
        {"top_k": 4},
        {"top_p": 0.8},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 100},
    ],
    ids=str,
)
def test_frequencies_and_logprobs_are_those_of_the_distribution(options: dict[str, Any], keys: jax.Array):
    tokens, logprobs = draws(Sampler.Config(**options).build(), keys)
    p = expected(**options)
    counts = np.bincount(tokens.ravel(), minlength=VOCAB)
    assert counts[p == 0].sum() == 0
    live = p > 0
    if live.sum() > 1:
        assert stats.chisquare(counts[live], tokens.size * p[live]).pvalue > 0.01
    else:
        assert counts[live].sum() == tokens.size
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(logprobs, np.log(p)[tokens], rtol=0, atol=1e-6)


def test_the_test_can_tell_neighbouring_distributions_apart(keys: jax.Array):
    """A chi-square that accepts anything proves nothing: temperature 1 is not 0.9, top-p 0.8 is not top-p 0.7."""
    tokens, _ = draws(Sampler.Config().build(), keys)
    counts = np.bincount(tokens.ravel(), minlength=VOCAB)
    assert stats.chisquare(counts, tokens.size * expected(temperature=0.9)).pvalue < 1e-6
    assert np.count_nonzero(expected(top_p=0.8)) != np.count_nonzero(expected(top_p=0.7))


def test_draws_of_other_samples_prompts_and_positions_are_independent(keys: jax.Array):
    tokens, _ = draws(Sampler.Config().build(), keys)
    tokens = tokens.reshape(PROMPTS, POSITIONS, SAMPLES)
    for axis in range(3):
        pairs = np.stack([np.moveaxis(tokens, axis, 0)[:-1].ravel(), np.moveaxis(tokens, axis, 0)[1:].ravel()])
        table, *_ = np.histogram2d(*pairs, bins=VOCAB)
        independent = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
        distance = np.sum((table - independent) ** 2 / independent)
        assert stats.chi2.sf(distance, (VOCAB - 1) ** 2) > 0.01


def test_bfloat16_logits_are_scored_in_float32():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    sampler = Sampler.Config(temperature=0.7).build()
    tokens, logprobs = sampler.draw(keys_of(0, [1], 64, 0), jnp.broadcast_to(logits, (1, 64, VOCAB)))
    assert logprobs.dtype == jnp.float32
    exact = np.asarray(logits, np.float64) / 0.7
    reference = exact - np.log(np.exp(exact).sum())
    np.testing.assert_allclose(logprobs, reference[np.asarray(tokens)], rtol=0, atol=1e-6)


def test_greedy_takes_the_first_of_equals():
    logits = jnp.asarray([[[0.0, 2.0, 2.0, 1.0]]])
    tokens, logprobs = Sampler.Config(temperature=0.0).build().draw(keys_of(0, [0], 1, 0), logits)
    assert (int(tokens[0, 0]), float(logprobs[0, 0])) == (1, 0.0)


def test_a_key_depends_on_seed_prompt_sample_and_position_and_on_all_of_them():
    seeds, prompts, samples, positions = [0, 1], [0, 1, 7, 1 << 32, (1 << 32) + 1], 3, [0, 1, 2]
    seen = set()
    for seed in seeds:
        for position in positions:
            data = np.asarray(jax.random.key_data(keys_of(seed, prompts, samples, position)))
            seen |= {tuple(key) for key in data.reshape(-1, data.shape[-1])}
    assert len(seen) == len(seeds) * len(prompts) * samples * len(positions)


def test_a_key_does_not_depend_on_batch_slot_or_number_of_samples():
    def data(prompts: list[int], samples: int) -> np.ndarray:
        return np.asarray(jax.random.key_data(keys_of(9, prompts, samples, 4)))

    here = data([11, 5, 8], 4)
    np.testing.assert_array_equal(data([5], 4)[0], here[1])
    np.testing.assert_array_equal(data([8, 3, 5, 1], 2)[2], here[1, :2])


def test_only_a_whole_distribution_is_not_truncated():
    assert not Sampler.Config().build().truncates
    assert not Sampler.Config(temperature=0.5).build().truncates
    for cfg in (Sampler.Config(temperature=0.0), Sampler.Config(top_k=5), Sampler.Config(top_p=0.99)):
        assert cfg.build().truncates


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "Sampler.temperature is -1.0"),
        ({"top_k": 0}, "Sampler.top_k is 0; expected 1 or more, or None"),
        ({"top_k": -1}, "Sampler.top_k is -1"),  # elsewhere "all tokens", and a source of silent greedy sampling
        ({"top_p": 0.0}, "Sampler.top_p is 0.0"),
        ({"top_p": 1.1}, "Sampler.top_p is 1.1"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        Sampler.Config(**options).build()
