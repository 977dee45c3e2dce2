import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.attention.rope import InterleavedRope, Llama3Scaling, Rope, rotate
from axlearn_like.layers.attention.rope_scaling import DynamicScaling, LinearScaling, YarnScaling
from tests.axlearn_like.layers import reference
from tests.bounds import within

pytestmark = pytest.mark.numerics

RNG = np.random.default_rng(0)


def rotated(x, positions, theta=10_000.0):
    rope = Rope.Config(head_dim=x.shape[-1], theta=theta).build(rngs=nnx.Rngs(0))
    return jax.jit(lambda x, p: rotate(x, *rope(p)))(x, positions)


def test_halves_turn_as_complex_numbers():
    x = RNG.normal(size=(2, 3, 2, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2], [100, 7, 4095]], np.int32)
    freq = reference.frequencies(8, 500.0)
    expected = [
        [[reference.rotate(head, position, freq) for head in heads] for heads, position in zip(row, where, strict=True)]
        for row, where in zip(x.astype(np.float64), positions, strict=True)
    ]
    y = rotated(x, positions, 500.0)
    np.testing.assert_allclose(y[0], expected[0], atol=1e-6)
    # Angles are float32: at position 4095 they are wrong by up to 2**-13.
    np.testing.assert_allclose(y[1], expected[1], atol=5e-4)


def test_scores_depend_on_the_distance_only():
    query, key = RNG.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(a, b):
        at = [rotated(x, np.array([[p]], np.int32)) for x, p in ((query, a), (key, b))]
        return float(jnp.sum(at[0] * at[1]))

    assert within(score(9, 4) - score(105, 100), 1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_heads_with_any_number_of_axes():
    x = RNG.normal(size=(1, 4, 2, 3, 8)).astype(np.float32)
    positions = np.arange(4, dtype=np.int32)[None]
    flat = rotated(x.reshape(1, 4, 6, 8), positions)
    np.testing.assert_array_equal(rotated(x, positions).reshape(1, 4, 6, 8), flat)


def test_bfloat16_turns_in_float32():
    x = jnp.asarray(RNG.normal(size=(1, 1, 1, 8)), jnp.bfloat16)
    y = rotated(x, np.array([[1001]], np.int32))
    assert y.dtype == jnp.bfloat16
    exact = reference.rotate(np.asarray(x, np.float64)[0, 0, 0], 1001, reference.frequencies(8, 10_000.0))
    np.testing.assert_allclose(np.asarray(y, np.float64)[0, 0, 0], exact, rtol=2**-8, atol=1e-3)


def test_llama_3_slows_long_waves_keeps_short_ones_and_blends_between():
    scaling = Llama3Scaling.Config(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192).build()
    wavelengths = np.array([10.0, 2047.0, 2048.0, 4096.0, 8192.0, 8193.0, 1e6])
    slowed = 2 * math.pi / scaling(2 * math.pi / wavelengths) / wavelengths
    # At 4096 = 8192 / 2 the weight of the kept frequency is (2 - 1) / (4 - 1).
    blend = 1 / ((1 - 1 / 3) / 8 + 1 / 3)
    np.testing.assert_allclose(slowed, [1, 1, 1, blend, 8, 8, 8], rtol=1e-12)


def test_the_scaling_reaches_the_angles():
    scaling = Llama3Scaling.Config(factor=4.0, original_length=16)
    plain, scaled = (Rope.Config(head_dim=8, scaling=s).build(rngs=nnx.Rngs(0)).freq for s in (None, scaling))
    assert scaled == tuple(scaling.build()(np.array(plain)))
    assert scaled[-1] == plain[-1] / 4


@pytest.mark.slow
def test_interpolation_is_a_shorter_position():
    x = RNG.normal(size=(1, 2, 1, 8)).astype(np.float32)
    cfg = Rope.Config(head_dim=8, scaling=LinearScaling.Config(factor=4.0))
    y = cfg.build(rngs=nnx.Rngs(0)).rotation(jnp.array([[8, 20]]))(jnp.asarray(x))
    np.testing.assert_allclose(y, rotated(x, np.array([[2, 5]])), atol=1e-6)


def test_yarn_keeps_fast_waves_slows_slow_ones_and_enlarges_scores():
    cfg = YarnScaling.Config(factor=4.0, original_length=1024, beta_fast=32.0, beta_slow=1.0, truncate=False)
    freq = 10_000.0 ** (-np.arange(32) / 32)
    slowed = freq / cfg.build()(freq)
    turns = 1024 * freq / (2 * math.pi)
    np.testing.assert_allclose(slowed[turns > 32], 1)
    np.testing.assert_allclose(slowed[turns < 1], 4)
    assert np.all(np.diff(slowed[(turns < 32) & (turns > 1)]) > 0)
    assert cfg.build().attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    even = cfg.clone(mscale=0.7, mscale_all_dim=0.7)
    assert even.build().attention_factor == 1
    cos, _ = Rope.Config(head_dim=8, scaling=cfg).build(rngs=nnx.Rngs(0))(jnp.array([[0]]))
    np.testing.assert_allclose(cos, 0.1 * math.log(4) + 1)


@pytest.mark.slow
def test_dynamic_scaling_changes_tokens_behind_the_original_length_alone():
    plain, dynamic = (
        Rope.Config(head_dim=8, scaling=scaling).build(rngs=nnx.Rngs(0))
        for scaling in (None, DynamicScaling.Config(factor=2.0, original_length=16))
    )
    within, behind = jnp.arange(16)[None], jnp.array([[16, 47]])
    np.testing.assert_array_equal(plain(within), dynamic(within))
    # A sequence of 48 tokens, three times the original length: 2 * 3 - 1 = 5 times the base to 8 / 6.
    base = 10_000.0 * 5 ** (8 / 6)
    expected = np.cos(47 * base ** (-np.arange(4) / 4))
    np.testing.assert_allclose(dynamic(behind)[0][0, 1], expected, atol=1e-5)
    assert np.all(np.abs(dynamic(behind)[0] - plain(behind)[0])[0, :, 1:].max(axis=0) > 1e-4)


@pytest.mark.slow
def test_neighbouring_pairs_turn_as_halves_of_a_sorted_head_do():
    query, key = RNG.normal(size=(2, 1, 3, 1, 8)).astype(np.float32)
    positions = jnp.array([[0, 3, 50]])
    pairs, halves = (
        kind.Config(head_dim=8).build(rngs=nnx.Rngs(0)).rotation(positions) for kind in (InterleavedRope, Rope)
    )
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    scores = jnp.einsum("btkh,bskh->ts", pairs(query), pairs(key))
    expected = jnp.einsum("btkh,bskh->ts", halves(query[..., order]), halves(key[..., order]))
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    angle = 50.0 * 10_000.0 ** (-np.arange(4) / 4)
    turned = (query[0, 2, 0, ::2] + 1j * query[0, 2, 0, 1::2]) * np.exp(1j * angle)
    np.testing.assert_allclose(np.asarray(pairs(query))[0, 2, 0], np.concatenate([turned.real, turned.imag]), atol=1e-5)
