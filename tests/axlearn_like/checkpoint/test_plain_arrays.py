"""Arrays on devices are copies, however they lie in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.plain_arrays import aligned_empty, put_copies

DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_memory_that_devices_take_is_aligned():
    for shape, dtype in (((3, 5), np.float32), ((), np.uint8), ((7,), jnp.bfloat16)):
        array = aligned_empty(shape, np.dtype(dtype))
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous


@pytest.mark.parametrize("offset", [0, 4, 64])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("sharding", [DEVICE, None])
def test_memory_may_be_overwritten(offset, order, sharding):
    memory = aligned_empty((4096 + 16,), np.dtype(np.float32))
    array = memory[offset // 4 :][:4096].reshape(64, 64)
    array[...] = np.arange(4096).reshape(64, 64)
    expected = array.transpose(order).copy()
    (placed,) = put_copies([array.transpose(order)], sharding)
    memory[...] = -1
    np.testing.assert_array_equal(np.asarray(placed), expected)
