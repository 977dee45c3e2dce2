"""Properties of every codec."""

from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh import UserError
from rl.parameter_server.codecs import get_codec
from rl.parameter_server.errors import WeightsError
from tests.rl.parameter_server.codecs.arrays import DTYPES, bits, dtypes, random_bits, seeds, shapes

with_av = pytest.mark.skipif(find_spec("av") is None, reason="PyAV is not installed")
PLAIN = ("raw", "bf16", "int8", "delta", "ecsq")
NAMES = (*PLAIN, pytest.param("hevc", marks=with_av))


def test_names() -> None:
    codecs = [get_codec(name) for name in PLAIN]
    assert [codec.name for codec in codecs] == list(PLAIN)
    assert [codec.lossless for codec in codecs] == [True, False, False, True, False]
    assert [codec.needs_base for codec in codecs] == [False, False, False, True, False]
    with pytest.raises(UserError, match="did you mean 'delta'"):
        get_codec("detla")


def test_an_error_may_follow_the_name():
    codec, array = get_codec("ecsq:0.05"), np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    blob = codec.encode(array)
    assert codec.name == "ecsq" and len(blob) < len(get_codec("ecsq").encode(array))
    found = get_codec("ecsq").decode(blob, shape=array.shape, dtype=array.dtype)  # any error decodes any other's
    assert 0.045 < np.mean((found - array) ** 2) / array.var() < 0.055
    for text in ("int8:0.01", "ecsq:", "ecsq:x", "ecsq:0", "ecsq:1", "ecsq:nan"):
        with pytest.raises(UserError, match="an error over the variance behind the name, as in 'ecsq:0.01'"):
            get_codec(text)


@given(seeds, shapes, dtypes, st.sampled_from(("raw", "delta")))
@settings(max_examples=150, deadline=None)
def test_lossless_codecs_keep_every_bit(seed: int, shape: tuple[int, ...], dtype: np.dtype, name: str) -> None:
    codec, array, base = get_codec(name), random_bits(seed, shape, dtype), random_bits(seed // 2, shape, dtype)
    decoded = codec.decode(codec.encode(array, base), shape=shape, dtype=dtype, base=base)
    assert (decoded.shape, decoded.dtype) == (shape, dtype)
    assert bits(decoded) == bits(array)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind in "biu"], ids=str)
def test_integers_keep_every_bit_in_every_codec(name: str, dtype: np.dtype) -> None:
    codec, array = get_codec(name), random_bits(0, (5, 3), dtype)
    base = np.zeros_like(array)
    decoded = codec.decode(codec.encode(array, base), shape=(5, 3), dtype=dtype, base=base)
    assert decoded.dtype == dtype
    assert bits(decoded) == bits(array)


@pytest.mark.parametrize("name", NAMES)
def test_strided_read_only_unaligned_and_big_endian_arrays(name: str) -> None:
    codec, plain = get_codec(name), np.arange(24, dtype=np.float32).reshape(4, 6)
    unaligned = np.frombuffer(b"x" + plain.tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 6)
    assert not unaligned.flags.aligned and not unaligned.flags.writeable
    base = np.zeros_like(plain)
    want = codec.decode(codec.encode(plain, base), shape=(4, 6), dtype=np.float32, base=base)
    strided = np.zeros((8, 12), np.float32)[::2, ::-2]
    strided[...] = plain
    for array in (np.asfortranarray(plain), strided, unaligned, plain.astype(">f4")):
        decoded = codec.decode(codec.encode(array, base), shape=(4, 6), dtype=np.float32, base=base)
        assert bits(decoded) == bits(want)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_fresh_memory(name: str) -> None:
    codec, array, base = get_codec(name), np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)
    blob = bytes(codec.encode(array, base))
    decoded = codec.decode(blob, shape=(3, 4), dtype=np.float32, base=base)
    assert decoded.flags.writeable and decoded.flags.c_contiguous
    decoded[:] = 7
    assert (base == 0).all() and bytes(codec.encode(array, base)) == blob


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda blob: memoryview(np.frombuffer(blob, np.int8))])
def test_any_bytes_like_blob_is_decoded(name: str, form: type) -> None:
    codec, array, base = get_codec(name), np.ones(300, np.float32), np.zeros(300, np.float32)
    blob = form(bytes(codec.encode(array, base)))
    assert bits(codec.decode(blob, shape=(300,), dtype=np.float32, base=base)) == bits(array)


@pytest.mark.parametrize(("name", "nbytes"), [("raw", 4000), ("bf16", 2008), ("int8", 8 + 4 * 8 + 1000)])
def test_sizes_are_exact(name: str, nbytes: int) -> None:
    assert len(get_codec(name).encode(np.ones((10, 100), np.float32))) == nbytes


def test_encoding_raw_copies_nothing() -> None:
    array = np.ones((10, 100), ml_dtypes.bfloat16)
    assert np.shares_memory(np.frombuffer(get_codec("raw").encode(array), np.uint8), array)


@pytest.mark.parametrize("name", NAMES)
def test_another_size_is_refused(name: str) -> None:
    codec, array, base = get_codec(name), np.ones(300, np.float32), np.zeros(300, np.float32)
    blob = codec.encode(array, base)
    for shape, dtype in (((299,), np.float32), ((301,), np.float32), ((300,), np.int64)):
        with pytest.raises(WeightsError):
            codec.decode(blob, shape=shape, dtype=dtype, base=np.zeros(shape, dtype))


@given(seeds, st.sampled_from(("bf16", "int8", "delta", "ecsq")), st.booleans())
@settings(max_examples=300, deadline=None)
def test_damage_is_noticed(seed: int, name: str, far: bool) -> None:
    """One bit flipped, an end cut off or bytes appended: WeightsError, whatever the place. (`raw` has no checksum.)"""
    rng, codec = np.random.default_rng(seed), get_codec(name)
    base = rng.standard_normal(500).astype(np.float32)
    array = np.where(rng.random(500) < 0.1, base * np.float32(1.5 if far else 1.0000001), base)
    blob = bytearray(codec.encode(array, base))
    kind, place = rng.integers(3), int(rng.integers(len(blob)))
    if kind == 0:
        blob[place] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del blob[place:]
    else:
        blob += bytes(rng.integers(0, 256, 1 + place % 9, np.uint8))
    with pytest.raises(WeightsError):
        codec.decode(blob, shape=(500,), dtype=np.float32, base=base)


@given(st.binary(max_size=200), st.sampled_from(PLAIN))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused(noise: bytes, name: str) -> None:
    with pytest.raises(WeightsError):
        get_codec(name).decode(noise, shape=(90,), dtype=np.float32, base=np.zeros(90, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_references_do_not_travel(name: str) -> None:
    array = np.array([{}, []], object)
    with pytest.raises(WeightsError, match="dtype object cannot be encoded"):
        get_codec(name).encode(array, array)
