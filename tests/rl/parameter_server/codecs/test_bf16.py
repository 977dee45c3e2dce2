import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from rl.parameter_server.codecs.plain import Bf16Codec
from tests.rl.parameter_server.codecs.arrays import bits, random_bits, seeds

CODEC, BF16 = Bf16Codec(), np.dtype(ml_dtypes.bfloat16)


@given(seeds)
@settings(max_examples=50, deadline=None)
def test_equals_the_cast_of_jax(seed: int) -> None:
    array = random_bits(seed, (1000,), np.dtype(np.float32))
    ours = CODEC.decode(CODEC.encode(array), shape=(1000,), dtype=BF16)
    theirs = np.asarray(jnp.asarray(array).astype(jnp.bfloat16))
    number = ~np.isnan(array)
    assert bits(ours[number]) == bits(theirs[number])
    assert np.isnan(ours.astype(np.float32)[~number]).all()
    assert np.isnan(theirs.astype(np.float32)[~number]).all()


def test_rounds_ties_to_even() -> None:
    array = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000001], np.uint32).view(np.float32)
    decoded = CODEC.decode(CODEC.encode(array), shape=(5,), dtype=BF16)
    assert decoded.view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x8000]


def test_no_nan_becomes_infinite_or_finite() -> None:
    payloads = np.r_[1 : 1 << 16, 1 << 22].astype(np.uint32)
    array = np.concatenate([payloads | 0x7F800000, payloads | 0xFF800000]).astype(np.uint32).view(np.float32)
    decoded = CODEC.decode(CODEC.encode(array), shape=array.shape, dtype=np.float32)
    assert np.isnan(decoded).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BF16])
def test_decodes_to_the_dtype_asked_for(dtype: np.dtype) -> None:
    array = np.array([[1.0, -2.5], [0.1, 3e-5]], BF16)
    decoded = CODEC.decode(CODEC.encode(array.astype(np.float32)), shape=(2, 2), dtype=dtype)
    assert decoded.dtype == dtype
    assert bits(decoded) == bits(array.astype(dtype))


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_bfloat16_keeps_every_bit(seed: int) -> None:
    array = random_bits(seed, (31, 7), BF16)
    assert bits(CODEC.decode(CODEC.encode(array), shape=(31, 7), dtype=BF16)) == bits(array)
