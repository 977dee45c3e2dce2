import ml_dtypes
import numpy as np
import pytest

from rl.parameter_server.codecs import EcsqCodec
from rl.parameter_server.errors import WeightsError

pytestmark = pytest.mark.numerics


def coded(codec: EcsqCodec, array: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Return bits a value, error over the variance, and what comes back."""
    blob = codec.encode(array)
    found = codec.decode(blob, shape=array.shape, dtype=array.dtype)
    error = np.mean((found.astype(np.float64) - array.astype(np.float64)) ** 2) / np.var(array.astype(np.float64))
    return 8 * len(blob) / array.size, float(error), found


@pytest.mark.parametrize("error", [1e-4, 1e-2, 0.2])
def test_the_error_is_the_one_asked_for_at_a_quarter_of_a_bit_over_the_bound(error: float):
    """No code of Gaussian entries takes fewer than log2(1 / error) / 2 bits (Shannon); this one takes 0.3 more."""
    array = np.random.default_rng(0).normal(3.0, 2.0, (256, 1024)).astype(np.float32)
    bits, found, _ = coded(EcsqCodec(error=error), array)
    assert 0.95 * error < found < 1.05 * error
    bound = np.log2(1 / error) / 2
    assert bound < bits < bound + 0.36


def test_rows_have_their_own_means_and_spreads():
    rng = np.random.default_rng(1)
    array = (rng.normal(size=(128, 2048)) * rng.uniform(0.01, 3, (128, 1)) + rng.normal(size=(128, 1)) * 9).astype("f4")
    bits, error, _ = coded(EcsqCodec(error=1e-3), array)
    flat_bits, flat_error, _ = coded(EcsqCodec(error=1e-3), array.reshape(-1))
    assert 0.9e-3 < error < 1.1e-3 and 0.9e-3 < flat_error < 1.1e-3
    assert bits < flat_bits - 1


def test_few_integers_take_less_than_a_bit_each():
    array = (np.random.default_rng(4).random((64, 1024)) < 0.02).astype(np.float32)
    bits, error, _ = coded(EcsqCodec(error=1e-2), array)
    assert error < 1.01e-2 and bits < 0.4  # their entropy is 0.14


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_floats(dtype: type):
    array = np.random.default_rng(2).normal(size=(64, 64)).astype(dtype)
    _, error, found = coded(EcsqCodec(error=1e-2), array)
    assert found.dtype == dtype and 0.9e-2 < error < 1.1e-2


def test_extremes_stay_finite():
    for scale in (3.4e38, 1e-40, 65504.0):
        dtype = np.float16 if scale == 65504.0 else np.float32
        array = (np.linspace(-1, 1, 300) * scale).astype(dtype)
        found = EcsqCodec(error=0.5).decode(EcsqCodec(error=0.5).encode(array), shape=(300,), dtype=dtype)
        assert np.isfinite(found).all()
        assert np.abs(found.astype("f8") - array.astype("f8")).max() <= scale


def test_an_outlier_keeps_the_integers_few():
    array = np.random.default_rng(3).normal(size=4096).astype(np.float32)
    array[77] = 1e6
    found = EcsqCodec(error=1e-12).decode(EcsqCodec(error=1e-12).encode(array), shape=(4096,), dtype=np.float32)
    assert np.abs(found - array).max() < 2e6 / 4000


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_named(bad: float):
    array = np.zeros((3, 5), np.float32)
    array[1, 2] = bad
    with pytest.raises(WeightsError, match=r"ecsq weights must be finite in float32; entry \[1, 2\]"):
        EcsqCodec().encode(array)
