"""BufferPool of a version that nobody looks at is used for the next, and never before."""

import gc
import time

import jax
import ml_dtypes
import numpy as np
import pytest

from rl.parameter_server.store.buffer_pool import BufferPool


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_comes_back_when_its_last_view_is_gone() -> None:
    memory = BufferPool()
    array = memory.empty((256, 256), np.float32)
    part, place = array[3:5].reshape(-1), address(array)
    del array
    other = memory.empty((256, 256), np.float32)
    assert address(other) != place  # a view is left
    del part
    again = memory.empty((512, 256), ml_dtypes.bfloat16)
    assert (address(again), again.dtype.name, again.flags.writeable) == (place, "bfloat16", True)
    assert place % 64 == 0


@pytest.mark.slow
def test_arrays_on_a_device_of_the_cpu_keep_it() -> None:
    memory = BufferPool()
    array = memory.empty((256, 256), np.float32)
    array[:], place = 7.0, address(array)
    placed = jax.block_until_ready(jax.device_put(array, jax.devices()[0]))
    assert placed.unsafe_buffer_pointer() == place  # in use where it lies
    del array
    other = memory.empty((256, 256), np.float32)
    other[:] = 0.0
    assert float(placed.min()) == 7.0
    del placed
    give_up = time.monotonic() + 20
    while not memory._returned and time.monotonic() < give_up:
        gc.collect()  # jax lets go of it then, or with the next of its calls, or later on a busy machine
        jax.block_until_ready(jax.numpy.zeros(1))
    assert address(memory.empty((256, 256), np.float32)) == place


def test_memory_of_other_sizes_makes_room() -> None:
    memory = BufferPool()
    for size in (1 << 20, 1 << 21, 3 << 20):
        memory.empty((size,), np.uint8)
    assert sum(one.nbytes for one in [*memory._spare, *memory._returned]) == 3 << 20
