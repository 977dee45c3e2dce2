"""Sampled tokens follow the stated distribution, are scored under it, and depend on the request alone."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from scipy.special import chdtrc

from axlearn_like.training.losses import Chosen
from mesh import UserError
from rl.rollout.decoding.drawing import distribution, draw, row_keys
from rl.rollout.sampling import NEVER, Sampler, pack_bias, pack_metadata, plain

VOCAB = 12
LOGITS = np.random.default_rng(5).normal(0.0, 1.5, VOCAB).astype(np.float32)
SEEN = np.isin(np.arange(VOCAB), [0, 3, 4, 9])
PROMPTS, SAMPLES, POSITIONS = 25, 40, 20

CASES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"logit_bias": ((2, 1.5), (7, -100.0))},
    {"presence_penalty": 1.25},
    {"frequency_penalty": -0.75, "presence_penalty": 0.5},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 2.0, "min_p": 0.2, "logit_bias": ((1, 3.0),)},
    {"temperature": 0.0, "logit_bias": ((1, 20.0),), "repetition_penalty": 2.0},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 1e-300},
)


def keys_of(seed: int, prompts: list[int], samples: int, position: int) -> jax.Array:
    """[prompts, samples], as the engine makes them."""
    identity = [[seed, p >> 32, p & 0xFFFFFFFF, sample] for p in prompts for sample in range(samples)]
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys(jnp.asarray(identity, jnp.uint32)), position)
    return keys.reshape(len(prompts), samples)


def expected(cfg: Sampler.Config, logits: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, float]:
    """The distribution by its definition, in float64 [vocab], and how near a token is to being cut or left."""
    x = logits.astype(np.float64)
    for token, bias in cfg.logit_bias:
        x[token] += bias
    penalty, times = cfg.repetition_penalty, seen // 2
    x = np.where(seen > 0, np.where(x > 0, x / penalty, x * penalty), x)
    x -= cfg.presence_penalty * (times > 0) + cfg.frequency_penalty * times
    if cfg.temperature == 0:
        others = np.delete(x, np.argmax(x))
        return np.eye(len(x))[np.argmax(x)], float(x.max() - others.max())
    p = np.exp((x - x.max()) / cfg.temperature)
    likelier = p[None, :] > p[:, None] * (1 + 1e-9)  # [token, than which], no order among equals
    p = np.where(likelier.sum(axis=1) < (cfg.top_k or len(p)), p, 0)
    p /= p.sum()
    mass_before = (likelier * p).sum(axis=1)
    distance = np.abs(mass_before - cfg.top_p).min() if cfg.top_p < 1 else 1.0
    p = np.where((mass_before < cfg.top_p) | ~likelier.any(axis=1) | (cfg.top_p == 1), p, 0)
    distance = min(distance, float(np.abs(p / p.max() - cfg.min_p).min()) if 0 < cfg.min_p < 1 else 1.0)
    p = np.where(p >= cfg.min_p * p.max() * (1 - 1e-9), p, 0)
    return p / p.sum(), float(distance)


def general(*args: Any) -> tuple[jax.Array, jax.Array, np.ndarray]:
    whole, tokens, chosen = _general(*args)
    return whole, tokens, chosen.logprobs()


@jax.jit
def _general(
    keys: jax.Array, logits: jax.Array, rules: Any, counts: jax.Array, bias: jax.Array, penalties: jax.Array
) -> tuple[jax.Array, jax.Array, Chosen]:
    whole = distribution(logits, rules, counts_rv=counts, bias_rv=bias, penalties_r2=penalties, plain=False)
    return whole, *draw(keys, whole)


def quick(*args: Any) -> tuple[jax.Array, jax.Array, np.ndarray]:
    whole, tokens, chosen = _quick(*args)
    return whole, tokens, chosen.logprobs()


@jax.jit
def _quick(keys: jax.Array, logits: jax.Array, rules: Any) -> tuple[jax.Array, jax.Array, Chosen]:
    whole = distribution(logits, rules, plain=True)
    return whole, *draw(keys, whole)


def by_rules(
    configs: Sequence[Sampler.Config], keys: jax.Array, logits: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distribution, tokens and log-probabilities of rows [r, vocab], by the general path; `seen`: counts or flags."""
    bias, rules = pack_bias(configs, logits.shape[1]), pack_metadata(configs, logits.shape[1])
    penalties = np.array([(one.presence_penalty, one.frequency_penalty) for one in configs], np.float32)
    arrays = keys, logits, rules, seen.astype(np.int32), bias, penalties
    whole, tokens, logprobs = jax.device_get(general(*arrays))
    return whole, tokens, logprobs


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.int32)


@pytest.fixture(scope="module")
def keys() -> jax.Array:
    """Keys of many prompts, samples and positions: [prompts, samples * positions]."""
    return jnp.concatenate([keys_of(3, list(range(PROMPTS)), SAMPLES, i) for i in range(POSITIONS)], axis=1)


def draws(options: dict[str, Any], keys: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """A token and its log-probability for each key [n]."""
    rows = (keys.size, VOCAB)
    configs = [Sampler.Config(**options)] * keys.size
    return by_rules(configs, keys, np.broadcast_to(LOGITS, rows), np.broadcast_to(SEEN, rows))[1:]


def chisquare(counts: np.ndarray, expected_counts: np.ndarray) -> float:
    """Return the p-value of Pearson's test. (`scipy.stats` takes seconds to import.)"""
    return float(chdtrc(counts.size - 1, np.sum((counts - expected_counts) ** 2 / expected_counts)))


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("options", CASES, ids=str)
def test_frequencies_and_logprobs_are_those_of_the_distribution(options: dict[str, Any], keys: jax.Array):
    tokens, logprobs = draws(options, keys.reshape(-1))
    p, _ = expected(Sampler.Config(**options), LOGITS, SEEN)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[p < 1e-12].sum() == 0  # cut, or banned by a bias
    live = p >= 1e-12
    if live.sum() > 1:
        assert chisquare(counts[live], tokens.size * p[live] / p[live].sum()) > 0.01
    else:
        assert counts[live].sum() == tokens.size
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(logprobs, np.log(p)[tokens], rtol=0, atol=4e-6)  # of numbers up to 10


@pytest.mark.slow
def test_the_test_can_tell_neighbouring_distributions_apart(keys: jax.Array):
    """A chi-square that accepts anything proves nothing."""
    counts = np.bincount(draws({}, keys.reshape(-1))[0], minlength=VOCAB)
    assert np.count_nonzero(counts) == VOCAB  # temperature 1 is not greedy
    others: tuple[dict[str, Any], ...]
    others = {"temperature": 0.9}, {"repetition_penalty": 1.25}, {"logit_bias": ((2, 0.25),)}
    for other in others:
        p, _ = expected(Sampler.Config(**other), LOGITS, SEEN)
        assert chisquare(counts, counts.sum() * p) < 1e-6
    nears: list[tuple[str, Any, Any]] = [("top_p", 0.8, 0.7), ("min_p", 0.1, 0.3), ("top_k", 4, 5)]
    for name, *values in nears:
        one, two = (expected(Sampler.Config(**{name: value}), LOGITS, SEEN)[0] for value in values)
        assert np.count_nonzero(one) != np.count_nonzero(two)


@pytest.mark.slow
def test_draws_of_other_samples_prompts_and_positions_are_independent(keys: jax.Array):
    tokens, _ = draws({}, keys.reshape(-1))
    tokens = tokens.reshape(PROMPTS, POSITIONS, SAMPLES)
    for axis in range(3):
        pairs = np.stack([np.moveaxis(tokens, axis, 0)[:-1].ravel(), np.moveaxis(tokens, axis, 0)[1:].ravel()])
        table, *_ = np.histogram2d(*pairs, bins=VOCAB)
        independent = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
        distance = np.sum((table - independent) ** 2 / independent)
        assert chdtrc((VOCAB - 1) ** 2, distance) > 0.01


@pytest.mark.slow
@pytest.mark.numerics
def test_bfloat16_logits_are_scored_in_float32():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    rules = pack_metadata([Sampler.Config(temperature=0.7)] * 64, VOCAB)
    _, tokens, logprobs = quick(keys_of(0, [1], 64, 0)[0], jnp.broadcast_to(logits, (64, VOCAB)), rules)
    assert logprobs.dtype == jnp.float32
    exact = np.asarray(logits, np.float64) / 0.7
    reference = exact - np.log(np.exp(exact).sum())
    np.testing.assert_allclose(logprobs, reference[np.asarray(tokens)], rtol=0, atol=4e-6)


# ---- the rules, against their definition

QUARTER = st.integers(-16, 16).map(lambda n: n / 4)
CONFIGS = st.builds(
    lambda **fields: Sampler.Config(**fields),
    temperature=st.sampled_from([0.0, 0.25, 1.0, 1.7]),
    top_k=st.none() | st.integers(1, VOCAB + 2),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.25, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), QUARTER, max_size=3).map(lambda d: tuple(d.items())),
)
ROWS = 4
COUNTS = nps.arrays(np.int32, (ROWS, VOCAB), elements=st.integers(0, 7))
QUARTERS = nps.arrays(np.float32, (ROWS, VOCAB), elements=QUARTER)


@pytest.mark.slow
@pytest.mark.numerics
@settings(deadline=None, max_examples=150)
@given(st.lists(CONFIGS, min_size=ROWS, max_size=ROWS), QUARTERS, COUNTS)
def test_rows_of_any_rules_follow_the_definition(configs: list[Sampler.Config], logits: np.ndarray, seen: np.ndarray):
    """Logits and biases are quarters, so that many are equal and the others are not nearly so."""
    wanted = [expected(*row) for row in zip(configs, logits, seen, strict=True)]
    assume(all(distance > 1e-5 for _, distance in wanted))
    whole, tokens, logprobs = by_rules(configs, jax.random.split(jax.random.key(0), ROWS), logits, seen)
    for row, (p, _) in enumerate(wanted):
        np.testing.assert_array_equal(whole[row] > NEVER / 2, p > 0)
        got = np.exp(whole[row].astype(np.float64) - whole[row].max())
        np.testing.assert_allclose(got / got.sum(), p, rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(logprobs[row], np.log(p[tokens[row]]), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_only_seen_tokens_are_penalised_and_become_less_likely_whatever_their_sign():
    logits = np.array([[2.0, 2.0, -2.0, -2.0]], np.float32)
    seen = np.array([[True, False, True, False]])
    cfg = Sampler.Config(repetition_penalty=2.0)
    whole, *_ = by_rules([cfg], jax.random.split(jax.random.key(0), 1), logits, seen)
    np.testing.assert_array_equal(whole, [[1.0, 2.0, -4.0, -2.0]])


@pytest.mark.slow
def test_equals_are_cut_or_kept_together_and_greedy_takes_the_first():
    logits = np.tile(np.array([0.0, 2.0, 2.0, 1.0, 1.0], np.float32), (4, 1))
    configs = [Sampler.Config(top_k=1), Sampler.Config(top_k=3), Sampler.Config(top_p=0.5)]
    configs += [Sampler.Config(temperature=0.0)]
    whole, tokens, logprobs = by_rules(
        configs, jax.random.split(jax.random.key(0), 4), logits, np.zeros_like(logits, bool)
    )
    kept = [np.flatnonzero(row > NEVER / 2).tolist() for row in whole]
    assert kept == [[1, 2], [1, 2, 3, 4], [1, 2], [1]]
    assert (tokens[3], logprobs[3]) == (1, 0.0)


@pytest.mark.slow
def test_a_broken_model_is_not_scored_as_certain():
    logits = np.tile(np.array([0.0, np.nan, 2.0], np.float32), (2, 1))
    configs = [Sampler.Config(temperature=0.0), Sampler.Config(top_k=2)]
    *_, logprobs = by_rules(configs, jax.random.split(jax.random.key(0), 2), logits, np.zeros_like(logits, bool))
    assert np.isnan(logprobs).all()


# ---- rows do not touch each other


def batch(vocab: int, dtype: Any = np.float32) -> tuple[list[Sampler.Config], jax.Array, np.ndarray, np.ndarray]:
    """A row of each case, with logits, a key and seen tokens of its own."""
    rng = np.random.default_rng(vocab)
    configs = [Sampler.Config(**options) for options in CASES]
    logits = rng.normal(0.0, 3.0, (len(CASES), vocab)).astype(dtype)
    return (
        configs,
        jax.random.split(jax.random.key(2), len(CASES)),
        logits,
        np.maximum(rng.integers(-9, 6, logits.shape), 0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [13, 272, 1001])
def test_a_row_does_not_depend_on_the_rules_and_logits_of_the_others(vocab: int):
    """A row's results are equal to the bit, whatever the number of the others."""
    configs, keys, logits, seen = batch(vocab)
    together = by_rules(configs, keys, logits, seen)
    for row in range(len(configs)):
        others = np.arange(len(configs)) != row
        quiet = [Sampler.Config() if other else configs[row] for other in others]
        silent = np.where(others[:, None], np.float32(0), logits)
        among_others = by_rules(quiet, keys, silent, seen * ~others[:, None])
        one = slice(row, row + 1)
        alone = by_rules(configs[one], keys[one], logits[one], seen[one])
        for what in range(3):
            np.testing.assert_array_equal(bits(among_others[what])[row], bits(together[what])[row])
            np.testing.assert_array_equal(bits(alone[what])[0], bits(together[what])[row])


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [13, 64, 100, 1001])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_plain_rows_have_the_bits_of_the_quick_path_among_rows_that_are_not(vocab: int, dtype: Any):
    configs, keys, logits, seen = batch(vocab, dtype)
    temperatures = iter([1.0, 0.7, 1 / 3, 1.3] * len(configs))
    configs = [cfg if i % 3 else Sampler.Config(temperature=next(temperatures)) for i, cfg in enumerate(configs)]
    rows = [i for i, cfg in enumerate(configs) if plain(cfg)]
    assert 0 < len(rows) < len(configs)
    logits[:, 0] = -0.0
    mixed = by_rules(configs, keys, logits, seen)
    stand_in = [cfg if plain(cfg) else Sampler.Config() for cfg in configs]
    alike = jax.device_get(quick(keys, logits, pack_metadata(stand_in, vocab)))
    for one, other in zip(mixed, alike, strict=True):
        np.testing.assert_array_equal(bits(one)[rows], bits(other)[rows])


@pytest.mark.slow
def test_a_draw_is_the_largest_of_logits_and_the_noise_of_the_key():
    configs, keys, logits, seen = batch(272)
    whole, tokens, _ = by_rules(configs, keys, logits, seen)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (272,)))(keys)
    np.testing.assert_array_equal(tokens, np.argmax(whole + np.asarray(noise), axis=1))


# ---- keys


@pytest.mark.slow
def test_a_key_is_the_seed_with_prompt_sample_and_position_folded_in():
    key = jax.random.key(jnp.uint32(4))
    for part in (3, 7, 2, 11):  # high and low half of the prompt's id, sample, position
        key = jax.random.fold_in(key, part)
    drawn = keys_of(4, [(3 << 32) + 7], 3, 11)[0, 2]
    np.testing.assert_array_equal(jax.random.key_data(drawn), jax.random.key_data(key))


def test_rows_of_any_request_have_the_keys_of_their_samples():
    identity = np.array([[4, 3, 7, 2], [9, 0, 5, 0], [4, 3, 7, 1]], np.uint32)
    rows = jax.random.key_data(row_keys(jnp.asarray(identity)))
    for row, (seed, high, low, sample) in zip(rows, identity.tolist(), strict=True):
        key = jax.random.key(jnp.uint32(seed))
        for part in (high, low, sample):
            key = jax.random.fold_in(key, jnp.uint32(part))
        np.testing.assert_array_equal(row, jax.random.key_data(key))


@pytest.mark.slow
def test_a_key_depends_on_seed_prompt_sample_and_position_and_on_all_of_them():
    seeds, prompts, samples, positions = [0, 1], [0, 1, 7, 1 << 32, (1 << 32) + 1], 3, [0, 1, 2]
    seen = set()
    for seed in seeds:
        for position in positions:
            data = np.asarray(jax.random.key_data(keys_of(seed, prompts, samples, position)))
            seen |= {tuple(key) for key in data.reshape(-1, data.shape[-1])}
    assert len(seen) == len(seeds) * len(prompts) * samples * len(positions)


@pytest.mark.slow
def test_a_key_does_not_depend_on_batch_slot_or_number_of_samples():
    def data(prompts: list[int], samples: int) -> np.ndarray:
        return np.asarray(jax.random.key_data(keys_of(9, prompts, samples, 4)))

    here = data([11, 5, 8], 4)
    np.testing.assert_array_equal(data([5], 4)[0], here[1])
    np.testing.assert_array_equal(data([8, 3, 5, 1], 2)[2], here[1, :2])


# ---- configs


def test_only_a_temperature_is_plain_and_known_to_the_trainer():
    assert [plain(Sampler.Config(**options)) for options in CASES] == [
        options.keys() <= {"temperature"} and (options.get("temperature") != 0) for options in CASES
    ]


def test_rules_are_packed_a_row_a_config():
    configs = [Sampler.Config(top_k=3, min_p=0.25), Sampler.Config(temperature=0.5, top_k=99), Sampler.Config()]
    rules = pack_metadata(configs, 10)
    assert rules.top_k.tolist() == [3, 10, 10] and rules.top_k.dtype == np.int32
    assert rules.temperature.tolist() == [1.0, 0.5, 1.0] and rules.min_p.tolist() == [0.25, 0.0, 0.0]
    bias = pack_bias([*configs, Sampler.Config(logit_bias=((9, 1.5),))], 10)
    assert bias.shape == (4, 10) and bias.sum() == bias[3, 9] == 1.5


NONSENSE = [
    ({"temperature": -1.0}, "temperature: expected 0 (greedy), or 0.0001 or more, got -1.0"),
    ({"temperature": 1e-6}, "temperature: expected 0 (greedy)"),
    ({"temperature": float("nan")}, "temperature: expected 0 (greedy)"),
    ({"top_k": 0}, "top_k: expected 1 or more, got 0"),
    ({"top_k": -1}, "top_k: expected 1 or more, got -1"),  # elsewhere a source of silent greedy sampling
    ({"top_p": 0.0}, "top_p: expected a share"),
    ({"top_p": 1.1}, "top_p: expected a share"),
    ({"min_p": -0.1}, "min_p: expected a ratio in [0, 1]"),
    ({"min_p": 1.1}, "min_p: expected a ratio"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: expected a factor of 0.001 to 1000, 1 for no penalty, got 0.0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty: expected a factor"),
    ({"presence_penalty": 101.0}, "presence_penalty: expected an amount of -100 to 100, 0 for no penalty, got 101.0"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty: expected an amount"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias: expected one bias for each token, 0 or more"),
    ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias: expected one bias for each token"),
    ({"logit_bias": ((3, float("-inf")),)}, "logit_bias: expected biases of -100 to 100"),
]


@pytest.mark.parametrize("options, message", NONSENSE)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match="^" + re.escape(f"Sampler.{message}")):
        Sampler.Config(**options).build()
    with pytest.raises(UserError, match="^" + re.escape(f"request 7: sampler.{message}")):
        Sampler.check(Sampler.Config(**options), VOCAB, "request 7: sampler")


def test_a_bias_on_a_token_that_does_not_exist_is_refused():
    cfg = Sampler.Config(logit_bias=((VOCAB - 1, 1.0), (VOCAB, 1.0)))
    with pytest.raises(UserError, match="^sampler.logit_bias names token 12; expected 0 to 11$"):
        Sampler.check(cfg, VOCAB, "sampler")
    Sampler.check(cfg, VOCAB + 1, "sampler")
