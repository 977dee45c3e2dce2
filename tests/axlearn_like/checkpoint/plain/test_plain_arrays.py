"""Arrays on devices are copies, however they lie in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.plain.plain_arrays import aligned_empty, put_copies
from tests.elsewhere import elsewhere

FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
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


@pytest.mark.parametrize("case", ["rows", "columns of the transposed", "parts of rows"])
def test_memory_may_be_overwritten_on_several_devices(case):
    """The part of a device can be contiguous where the array is not."""
    assert elsewhere(overwritten_on_four_devices, case, environ=FOUR_DEVICES)


def overwritten_on_four_devices(case):
    memory = aligned_empty((4, 64), np.dtype(np.float32))
    memory[...] = np.arange(256).reshape(4, 64)
    spec = jax.sharding.PartitionSpec
    array, parts = {
        "rows": (memory, spec("x")),
        "columns of the transposed": (memory.T, spec(None, "x")),
        "parts of rows": (memory[:, :32], spec("x")),
    }[case]
    expected = array.copy()
    mesh = jax.make_mesh((4,), ("x",))
    (placed,) = put_copies([array], jax.sharding.NamedSharding(mesh, parts))
    memory[...] = -1
    return np.array_equal(np.asarray(placed), expected)
