import struct

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.parameter_server.codecs import delta
from rl.parameter_server.codecs.delta import DELTA, DENSE, DeltaCodec
from rl.parameter_server.codecs.layout import CHECKSUM_NBYTES
from rl.parameter_server.errors import WeightsError, WrongBase
from rl.parameter_server.fingerprint import digest_of
from tests.rl.parameter_server.codecs.arrays import bits, changed, dtypes, random_bits, seeds, shapes

CODEC, BF16 = DeltaCodec(), np.dtype(ml_dtypes.bfloat16)
EMPTY_DELTA = CHECKSUM_NBYTES + 1 + 32 + 2 * 9  # checksum, kind, head, two empty frames


def kind(blob: delta.Blob) -> int:
    return memoryview(blob)[CHECKSUM_NBYTES]


def decode(blob: delta.Blob, base: np.ndarray) -> np.ndarray:
    return CODEC.decode(blob, shape=base.shape, dtype=base.dtype, base=base)


def weights(count: int = 20_000, seed: int = 0) -> np.ndarray:
    return (0.02 * np.random.default_rng(seed).standard_normal(count)).astype(BF16)


@given(seeds, shapes, dtypes, st.sampled_from((0.0, 0.002, 0.05, 0.5)), st.sampled_from((7, 64, 1 << 18)))
@settings(max_examples=300, deadline=None)
def test_sparse_changes_keep_every_bit(
    seed: int, shape: tuple[int, ...], dtype: np.dtype, share: float, at_once: int
) -> None:
    base = random_bits(seed, shape, dtype)
    array = changed(base, seed + 1, share)
    before = bits(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_AT_ONCE", at_once)
        blob = CODEC.encode(array, base)
        decoded = decode(blob, base)
    assert bits(decoded) == bits(array) and bits(base) == before
    assert len(blob) <= array.nbytes + CHECKSUM_NBYTES + 1
    assert bytes(CODEC.encode(array, base)) == bytes(blob)  # however much was looked at at a time


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
def test_every_value_to_every_special_value(dtype: np.dtype) -> None:
    """All 65,536 patterns of 16 bits, each to zeros, infinities, NaNs, denormals and to its neighbours."""
    base = np.arange(1 << 16, dtype=np.uint16)
    for target in (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x7FFF):
        array = np.full_like(base, target)
        assert bits(decode(CODEC.encode(array.view(dtype), base.view(dtype)), base.view(dtype))) == bits(array)
    for step in (1, -1):
        array = (base + np.uint16(step % (1 << 16))).view(dtype)
        blob = CODEC.encode(array, base.view(dtype))
        assert kind(blob) == DELTA
        assert bits(decode(blob, base.view(dtype))) == bits(array)


def test_neighbours_are_one_step_apart() -> None:
    """Down and up the whole line of bfloat16, from -inf over -0.0 and 0.0 to inf."""
    line = np.concatenate([np.arange(0xFF80, 0x7FFF, -1), np.arange(0, 0x7F81)]).astype(np.uint16)
    assert (delta._distance(line[:-1], line[1:], ordered=True) == 1).all()
    assert (delta._distance(line[1:], line[:-1], ordered=True) == 0).all()
    assert delta._distance(line[:1], line[2:3], ordered=True) == 3


def test_signed_zeros_and_nan_payloads_differ() -> None:
    base = np.array([0.0, -0.0] * 200, np.float32)
    base.view(np.uint32)[100:110] = 0x7FC00001
    array = base.copy()
    array.view(np.uint32)[:2] ^= 1 << 31
    array.view(np.uint32)[105] = 0xFFC12345
    blob = CODEC.encode(array, base)
    assert kind(blob) == DELTA
    assert bits(decode(blob, base)) == bits(array)


def test_nothing_changed_is_a_head_only() -> None:
    base = weights()
    assert len(CODEC.encode(base.copy(), base)) == EMPTY_DELTA


def test_one_step_in_thirty_takes_a_fiftieth() -> None:
    """3 % of entries, one step each: the entropy of which entries and of the sign is 0.22 bits an entry."""
    base = weights(1 << 18)
    rng = np.random.default_rng(1)
    where = rng.random(base.size) < 0.03
    array = base.copy()
    array.view(np.uint16)[where] += np.where(rng.random(int(where.sum())) < 0.5, 1, 0xFFFF).astype(np.uint16)
    nbytes = len(CODEC.encode(array, base))
    assert 0.22 * base.size / 8 < nbytes < base.nbytes / 50


def test_masters_that_all_change_take_less_than_themselves() -> None:
    base = weights(1 << 16).astype(np.float32)
    array = base + np.float32(1e-6)
    blob = CODEC.encode(array, base)
    assert kind(blob) == DELTA and len(blob) < 0.6 * array.nbytes
    assert bits(decode(blob, base)) == bits(array)


def test_other_weights_travel_whole() -> None:
    base, array = weights(), random_bits(1, (20_000,), BF16)
    blob = CODEC.encode(array, base)
    assert kind(blob) == DENSE and len(blob) == array.nbytes + CHECKSUM_NBYTES + 1
    nowhere = CODEC.decode(blob, shape=array.shape, dtype=BF16)  # a whole array needs no base
    assert bits(nowhere) == bits(decode(blob, base)) == bits(array)


def test_gaps_beyond_a_byte() -> None:
    base = np.zeros(1_000_003, np.int16)
    array = base.copy()
    array[[0, 254, 509, 510, 766, 70_000, 999_999, 1_000_002]] = [1, -1, 300, -300, 32767, -32768, 5, 6]
    blob = CODEC.encode(array, base)
    assert len(blob) < 200
    assert bits(decode(blob, base)) == bits(array)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4000])
def test_indices_are_those_of_numpy(size: int) -> None:
    for share in (0.0, 0.04, 1.0):
        marks = np.random.default_rng(size).random(size) < share
        assert np.array_equal(delta._indices(marks), np.flatnonzero(marks))


def test_the_digest_of_the_array_is_in_the_delta() -> None:
    base = weights()
    array = changed(base, 1, 0.01)
    assert CODEC.digest(CODEC.encode(array, base)) == digest_of(array)
    assert CODEC.digest(CODEC.encode(random_bits(1, (20_000,), BF16), base)) is None


@pytest.mark.parametrize("where", [0, 777, -1])
def test_another_base_is_noticed(where: int) -> None:
    base = weights()
    blob = CODEC.encode(changed(base, 1, 0.01), base)
    wrong = base.copy()
    wrong.view(np.uint16)[where] ^= 1
    with pytest.raises(WrongBase, match="another base"):
        decode(blob, wrong)


def test_a_base_that_does_not_fit_is_named() -> None:
    base = weights(600)
    blob = CODEC.encode(base, base)
    with pytest.raises(WrongBase, match="needs the array"):
        CODEC.decode(blob, shape=(600,), dtype=BF16)
    with pytest.raises(WrongBase, match="needs the array"):
        CODEC.encode(base)
    for other in (base[1:], base.reshape(2, 300), base.view(np.float16)):
        with pytest.raises(WrongBase, match="does not fit a base of"):
            CODEC.encode(base, other)
        with pytest.raises(WrongBase, match="does not fit a base of"):
            CODEC.decode(blob, shape=(600,), dtype=BF16, base=other)


def test_a_delta_of_another_dtype_is_noticed() -> None:
    """The same bits as another type: the result cannot be right."""
    base = np.array([-1.0] * 1000, np.float16)
    array = np.array([-1.5] * 1000, np.float16)
    blob = CODEC.encode(array, base)
    with pytest.raises(WeightsError, match="or for another dtype"):
        CODEC.decode(blob, shape=(1000,), dtype=np.int16, base=base.view(np.int16))


@given(seeds, st.booleans())
@settings(max_examples=300, deadline=None)
def test_bytes_that_no_encoder_wrote(seed: int, in_head: bool) -> None:
    """Behind a right checksum: whatever they are, WeightsError or the very array; nothing else, and no crash."""
    rng = np.random.default_rng(seed)
    base = weights(1000, seed)
    array = changed(base, seed, 0.1)
    blob = bytearray(CODEC.encode(array, base))
    for place in rng.integers(CHECKSUM_NBYTES, CHECKSUM_NBYTES + 33 if in_head else len(blob), int(rng.integers(1, 4))):
        blob[place] = int(rng.integers(256))
    struct.pack_into("<Q", blob, 0, xxhash.xxh3_64_intdigest(blob[CHECKSUM_NBYTES:]))
    try:
        decoded = decode(blob, base)
    except WeightsError:
        return
    assert bits(decoded) == bits(array)
