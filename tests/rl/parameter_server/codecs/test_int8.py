import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.parameter_server.codecs import int8
from rl.parameter_server.codecs.int8 import BLOCK, SMALLEST_SCALE, Int8Codec
from rl.parameter_server.errors import WeightsError
from tests.rl.parameter_server.codecs.arrays import seeds, shapes

CODEC = Int8Codec()


def round_trip(array: np.ndarray) -> np.ndarray:
    return CODEC.decode(CODEC.encode(array), shape=array.shape, dtype=array.dtype)


def bound(array: np.ndarray) -> np.ndarray:
    """Half a scale for each entry, and what float32 rounds."""
    flat = np.abs(array.astype(np.float64).reshape(-1))
    largest = [flat[i : i + BLOCK].max() for i in range(0, len(flat), BLOCK)]
    scale = np.maximum(np.repeat(largest, BLOCK)[: len(flat)] / 127, SMALLEST_SCALE)
    return (scale * (0.5 + 1e-4)).reshape(array.shape)


@given(seeds, shapes, st.sampled_from((-45, -38, -30, 0, 15, 38)))
@settings(max_examples=100, deadline=None)
def test_error_is_at_most_half_a_step(seed: int, shape: tuple[int, ...], magnitude: int) -> None:
    rng = np.random.default_rng(seed)
    array = (rng.uniform(-3.4, 3.4, shape) * 10.0**magnitude).astype(np.float32)
    error = np.abs(round_trip(array).astype(np.float64) - array)
    assert (error <= bound(array)).all()


@pytest.mark.numerics
def test_every_block_has_a_scale_of_its_own() -> None:
    array = np.concatenate([np.full(BLOCK, 1e-6), np.full(BLOCK, 1e6)]).astype(np.float32)
    np.testing.assert_allclose(round_trip(array), array, rtol=1e-6)


def test_arrays_longer_than_what_is_worked_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).standard_normal(5 * BLOCK + 3).astype(np.float32)
    whole = bytes(CODEC.encode(array))
    monkeypatch.setattr(int8, "_AT_ONCE", 2 * BLOCK)
    assert bytes(CODEC.encode(array)) == whole
    assert (np.abs(round_trip(array) - array) <= bound(array)).all()


@pytest.mark.numerics
def test_the_largest_float_stays_finite() -> None:
    largest = np.finfo(np.float32).max
    array = np.array([largest, -largest, 0, largest / 3], np.float32)
    decoded = round_trip(array)
    assert np.isfinite(decoded).all()
    np.testing.assert_allclose(decoded[:2], array[:2], rtol=1e-6)


def test_zeros_are_exact() -> None:
    assert (round_trip(np.zeros(200, np.float32)) == 0).all()


def test_bfloat16() -> None:
    array = np.random.default_rng(0).standard_normal((50, 7)).astype(ml_dtypes.bfloat16)
    decoded = round_trip(array)
    assert decoded.dtype == ml_dtypes.bfloat16
    error = np.abs(decoded.astype(np.float64) - array.astype(np.float64))
    assert (error <= bound(array) + 2.0**-8 * np.abs(array.astype(np.float64))).all()  # and what bfloat16 rounds


@pytest.mark.parametrize(("value", "shown"), [(np.inf, "inf"), (-np.inf, "-inf"), (np.nan, "nan"), (1e39, "1e\\+39")])
def test_what_is_not_finite_is_refused_by_place(value: float, shown: str) -> None:
    array = np.ones((20, 30))
    array[13, 4] = value
    with pytest.raises(WeightsError, match=rf"entry \[13, 4\] of float64 is {shown}"):
        CODEC.encode(array)
