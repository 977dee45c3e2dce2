import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.parameter_server.codecs import rans

pytestmark = pytest.mark.numerics


def drawn(seed: int, count: int, alphabet: int, group_count: int) -> tuple[np.ndarray, np.ndarray]:
    """Symbols of skewed frequencies, others in each group, and their groups."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, group_count, count)
    shares = rng.dirichlet(np.full(alphabet, 0.1), group_count)
    ends = np.cumsum(shares, axis=1)[groups]
    return np.minimum((rng.random(count)[:, None] > ends).sum(axis=1), alphabet - 1), groups


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(0, 6000), st.sampled_from((1, 2, 17, 300)), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_symbols_come_back(seed: int, count: int, alphabet: int, group_count: int):
    symbols, groups = drawn(seed, count, alphabet, group_count)
    freqs = rans.frequencies(symbols, groups, group_count)
    assert (freqs.sum(axis=1, dtype=np.int64) == 1 << 14).all()
    states, words = rans.encode(symbols, groups, freqs)
    np.testing.assert_array_equal(rans.decode(states, words, groups, freqs), symbols)


@pytest.mark.slow
@pytest.mark.parametrize("alphabet", [2, 12, 200])
def test_bits_are_within_a_hundredth_of_the_entropy(alphabet: int):
    symbols, groups = drawn(1, 400_000, alphabet, 2)
    states, words = rans.encode(symbols, groups, rans.frequencies(symbols, groups, 2))
    entropy = 0.0
    for group in range(2):
        counts = np.bincount(symbols[groups == group]).astype(np.float64)
        counts = counts[counts > 0]
        entropy -= float((counts * np.log2(counts / counts.sum())).sum())
    bits = 32 * len(states) + 16 * len(words)
    assert entropy <= bits <= 1.01 * entropy + 40 * len(states)


def test_the_largest_alphabet_and_rare_symbols():
    symbols = np.concatenate([np.arange(4096), np.zeros(100_000, np.int64)])
    groups = np.zeros_like(symbols)
    freqs = rans.frequencies(symbols, groups, 1)
    assert freqs.min() == 1 and freqs.sum(dtype=np.int64) == 1 << 14
    states, words = rans.encode(symbols, groups, freqs)
    np.testing.assert_array_equal(rans.decode(states, words, groups, freqs), symbols)


def test_what_is_not_a_code_is_refused():
    symbols, groups = drawn(3, 3000, 20, 1)
    freqs = rans.frequencies(symbols, groups, 1)
    states, words = rans.encode(symbols, groups, freqs)
    for bad in (words[:-1], np.append(words, np.uint16(1)), words + np.uint16(1)):
        with pytest.raises(ValueError, match="entropy coder"):
            rans.decode(states, bad, groups, freqs)
    with pytest.raises(ValueError, match="do not fit"):
        rans.decode(states, words, groups, freqs * 2)
    with pytest.raises(ValueError, match="do not fit"):
        rans.decode(np.append(states, states), words, groups, freqs)
