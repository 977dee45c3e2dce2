import sys

import numpy as np
import pytest

from mesh import UserError
from rl.parameter_server.codecs import EcsqCodec, HevcCodec, get_codec
from rl.parameter_server.codecs.hevc import _decode, _encode, _layout, _levels, _pictures
from rl.parameter_server.errors import WeightsError

pytestmark = pytest.mark.numerics

SHAPES = ((1, 1), (1, 7), (1, 5000), (3000, 2), (40, 33), (256, 16), (5, 512), (700, 600), (2100, 64), (131, 64))


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_hold_every_entry_once(shape: tuple[int, int]):
    levels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    pictures = _pictures(levels)
    assert min(pictures.shape[1:]) >= 32 and pictures.shape[2] <= 576
    assert pictures.size <= 1.3 * levels.size + 64 * max(pictures.shape[1:])
    np.testing.assert_array_equal(_levels(pictures, shape), levels)
    assert _layout(*shape)[1:] == pictures.shape[:0:-1]
    with pytest.raises(ValueError, match="pictures of shape"):
        _levels(pictures[:, :-1], shape)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "av", None)
    for use in (lambda: get_codec("hevc"), lambda: HevcCodec().encode(np.ones(3, np.float32))):
        with pytest.raises(UserError, match=r"'hevc' needs PyAV; expected pip install 'axlearn-like\[video\]'"):
            use()


class TestWithLibrary:
    @pytest.fixture(autouse=True)
    def needs_av(self):
        pytest.importorskip("av")

    def test_all_levels_survive_the_finest_quantiser(self):
        """Full range: 0 and 255 come back, where a limited range would lose 0 to 15 and 236 to 255."""
        picture = np.repeat(np.arange(256, dtype=np.uint8), 64).reshape(1, 128, 128)
        found = _decode(_encode(picture, 0, "medium"))
        assert found.shape == picture.shape and found.dtype == np.uint8
        assert np.abs(found.astype(int) - picture).max() <= 1
        assert found.min() == 0 and found.max() == 255

    def test_several_pictures_keep_their_order(self):
        pictures = np.stack([np.full((64, 64), 40 * n, np.uint8) for n in range(6)])
        np.testing.assert_allclose(_decode(_encode(pictures, 10, "ultrafast")), pictures, rtol=0, atol=2)

    @pytest.mark.parametrize("error", [1e-3, 3e-2])
    def test_the_error_is_kept_and_the_next_qp_would_break_it(self, error: float):
        rng = np.random.default_rng(1)
        array = (np.cumsum(rng.normal(size=(64, 256)), axis=1) + 5 * rng.normal(size=(64, 1))).astype(np.float32)
        codec = HevcCodec(error=error, preset="ultrafast")
        blob = codec.encode(array)
        found = np.mean((codec.decode(blob, shape=array.shape, dtype=array.dtype) - array) ** 2) / array.var()
        assert found <= error * 1.001
        sizes = {qp: len(HevcCodec(qp=qp, preset="ultrafast").encode(array)) for qp in range(52)}
        (chosen,) = [qp for qp in sizes if sizes[qp] == len(blob)][-1:]
        coarser = HevcCodec(qp=chosen + 1, preset="ultrafast")
        worse = coarser.decode(coarser.encode(array), shape=array.shape, dtype=array.dtype)
        assert np.mean((worse - array) ** 2) / array.var() > error

    def test_neighbours_that_are_alike_take_fewer_bits_than_independent_coding(self):
        array = np.cumsum(np.random.default_rng(2).normal(size=(64, 1024)), axis=1).astype(np.float32)
        assert len(HevcCodec().encode(array)) < 0.5 * len(EcsqCodec().encode(array))

    @pytest.mark.parametrize("scale", [3e38, 1e-40, 0.0])
    def test_extremes_stay_finite(self, scale: float):
        array = (np.linspace(-1, 1, 64 * 64) * scale).astype(np.float32).reshape(64, 64)
        found = HevcCodec().decode(HevcCodec().encode(array), shape=array.shape, dtype=np.float32)
        assert np.isfinite(found).all() and np.abs(found - array).max() <= 0.05 * scale + 1e-38

    def test_what_is_not_finite_is_named(self):
        array = np.zeros((3, 5), np.float32)
        array[2, 0] = np.nan
        with pytest.raises(WeightsError, match=r"hevc weights must be finite in float32; entry \[2, 0\]"):
            HevcCodec().encode(array)
