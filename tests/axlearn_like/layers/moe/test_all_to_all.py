"""Rows between devices, which `vmap` stands for: blocks of a fixed size, and what a ragged all-to-all would do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.moe.all_to_all import (
    Slices,
    combine_slices,
    dispatch_slices,
    padded_combine,
    padded_dispatch,
    plan_sends,
)

DEVICES, ROWS, DIM = 3, 10, 2
SIZES = np.array([[4, 0, 6], [10, 0, 0], [1, 5, 4]], np.int32)
X = np.arange(1, 1 + DEVICES * ROWS * DIM, dtype=np.float32).reshape(DEVICES, ROWS, DIM)


def everywhere(function: Any, *args: Any) -> Any:
    return jax.device_get(jax.jit(jax.vmap(function, axis_name="expert"))(*args))


def ragged_all_to_all(operands: np.ndarray, length: int, slices: Slices) -> np.ndarray:
    """All devices' results, by the documentation of `jax.lax.ragged_all_to_all`."""
    out = np.zeros((DEVICES, length, DIM), np.float32)
    for sender in range(DEVICES):
        for receiver in range(DEVICES):
            start, size = slices.input_offsets[sender][receiver], slices.send_sizes[sender][receiver]
            there = slices.output_offsets[sender][receiver]
            assert size == slices.recv_sizes[receiver][sender]
            out[receiver, there : there + size] = operands[sender, start : start + size]
    return out


@pytest.mark.parametrize("capacity", [ROWS, 5])
def test_rows_arrive_in_their_senders_block_and_come_back(capacity):
    def there_and_back(x: jax.Array, sizes: jax.Array) -> Any:
        plan = plan_sends(sizes, capacity, "expert")
        there = padded_dispatch(x, plan, capacity=capacity, axis="expert")
        back = padded_combine(there, plan, rows=ROWS, axis="expert")
        return there, back, dispatch_slices(plan, capacity, "expert"), combine_slices(plan, capacity, "expert")

    there, back, slices, returning = everywhere(there_and_back, X, SIZES)
    expected, home = np.zeros((DEVICES, DEVICES, capacity, DIM)), np.zeros_like(X)
    for sender in range(DEVICES):
        starts = np.cumsum([0, *SIZES[sender]])
        for receiver in range(DEVICES):
            start, kept = starts[receiver], min(SIZES[sender, receiver], capacity)
            expected[receiver, sender, :kept] = X[sender, start : start + kept]
            home[sender, start : start + kept] = X[sender, start : start + kept]
    np.testing.assert_array_equal(there, expected.reshape(there.shape))
    np.testing.assert_array_equal(back, home)
    assert (capacity == ROWS) == np.array_equal(back, X)
    # TPUs do it by a ragged all-to-all: the same rows in the same places.
    np.testing.assert_array_equal(ragged_all_to_all(X, DEVICES * capacity, slices), there)
    np.testing.assert_array_equal(ragged_all_to_all(there, ROWS, returning), back)


def test_each_way_is_the_gradient_of_the_other():
    """<dispatch(x), w> = <x, combine(w)> holds for any values."""

    def products(x: jax.Array, sizes: jax.Array, w: jax.Array) -> Any:
        plan = plan_sends(sizes, 5, "expert")
        there = padded_dispatch(x, plan, capacity=5, axis="expert")
        return jnp.sum(there * w), jnp.sum(x * padded_combine(w, plan, rows=ROWS, axis="expert"))

    weights = np.random.default_rng(0).normal(size=(DEVICES, DEVICES * 5, DIM)).astype(np.float32)
    one, other = everywhere(products, X, SIZES, weights)
    np.testing.assert_allclose(one.sum(), other.sum(), rtol=1e-5)
