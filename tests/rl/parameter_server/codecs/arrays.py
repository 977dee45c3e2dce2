"""Arrays that codecs must carry: every dtype with every pattern of bits, in every shape."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

DTYPES = tuple(
    np.dtype(dtype)
    for dtype in (
        *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
        *(np.bool_, np.int8, np.uint16, np.int32, np.uint32, np.int64),
        *(np.complex64, np.complex128),
    )
)
SHAPES = ((), (0,), (1,), (3, 0, 2), (7,), (2, 3, 5), (40, 33))
# Signed zeros, infinities, NaNs of several payloads, the smallest denormals, the largest, one; as bfloat16 and float32.
SPECIAL = (0, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 1, 0x8001, 0x7F, 0x3F80)
SPECIAL_BITS = {2: SPECIAL, 4: (1, (1 << 31) + 1, 0x7F800001, *(bits << 16 for bits in SPECIAL))}


def random_bits(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Any bits that values of the dtype have, special ones among them."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype == ml_dtypes.int4:
        return rng.integers(-8, 8, shape).astype(dtype)
    data = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    if dtype.itemsize in SPECIAL_BITS and count:
        flat = data.view(f"u{dtype.itemsize}")
        chosen = rng.integers(0, count, (count + 3) // 4)
        flat[chosen] = rng.choice(np.array(SPECIAL_BITS[dtype.itemsize], flat.dtype), len(chosen))
    return data.view(dtype).reshape(shape)


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


def changed(array: np.ndarray, seed: int, share: float) -> np.ndarray:
    """A copy in which about this share of the entries has other bits, half of them one step away."""
    rng = np.random.default_rng(seed)
    result = array.copy()
    if result.dtype in (np.dtype(np.bool_), np.dtype(ml_dtypes.int4)):
        return np.where(rng.random(array.shape) < share, random_bits(seed, array.shape, array.dtype), array)
    width = result.dtype.itemsize if result.dtype.itemsize <= 8 else 1
    flat = result.reshape(-1).view(f"u{width}")
    where = np.flatnonzero(rng.random(flat.shape) < share)
    far = rng.integers(0, 256, (len(where), width), np.uint8).view(flat.dtype).reshape(-1)
    flat[where] += np.where(rng.random(len(where)) < 0.5, np.ones_like(far), far)
    return result


dtypes = st.sampled_from(DTYPES)
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**32 - 1)
