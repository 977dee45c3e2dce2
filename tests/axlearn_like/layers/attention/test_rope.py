import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.layers.attention.rope import Llama3Scaling, Rope, rotate
from tests.axlearn_like.layers import reference

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

    assert abs(score(9, 4) - score(105, 100)) < 1e-4
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
