import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rl.parameter_server.store import rounding
from rl.parameter_server.store.rounding import convert, round_to_bfloat16

SPECIAL = (
    0x7F800000,
    0xFF800000,
    0x7F800001,
    0xFFFFFFFF,
    0x7FC00000,
    0x7F7FFFFF,
    0x80000000,
    0x3F808000,
    0x3F818000,
    1,
)


@pytest.mark.parametrize("special", [(), SPECIAL, SPECIAL[:1], SPECIAL[:2], SPECIAL[5:]], ids=len)
@pytest.mark.parametrize("at_once", [64, 1 << 16])
def test_every_kind_of_float_is_rounded_as_by_jax(special: tuple[int, ...], at_once: int, monkeypatch) -> None:
    monkeypatch.setattr(rounding, "_AT_ONCE", at_once)
    finite = np.random.default_rng(0).integers(0, 0x7F800000, 5000, np.uint32)  # some overflow, some are denormal
    words = np.concatenate([finite, finite | 0x80000000, np.array(special, np.uint32)])
    floats = np.random.default_rng(1).permutation(words).view(np.float32)
    target = np.empty(floats.size, ml_dtypes.bfloat16)
    round_to_bfloat16(floats, target)
    expected = np.asarray(jnp.asarray(floats).astype(jnp.bfloat16))
    assert np.array_equal(target.view(np.uint16), expected.view(np.uint16))


def test_a_target_that_is_not_contiguous_is_written() -> None:
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    memory = np.full((4, 3), -1, ml_dtypes.bfloat16)
    convert(source, memory.T)
    assert np.array_equal(memory.T.astype(np.float32), source)
