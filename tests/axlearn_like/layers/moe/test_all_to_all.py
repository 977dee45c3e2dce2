"""Rows between devices, which `vmap` stands for: gathered, and what a ragged all-to-all would do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.moe.all_to_all import SendPlan, count_rounds, gathered_combine, gathered_dispatch, plan_round

pytestmark = pytest.mark.numerics

DEVICES, EXPERTS, ROWS, DIM = 3, 6, 10, 2  # two experts a device
# The last device's last row goes nowhere, as padding does; the second device sends all to one expert.
SIZES = np.array([[4, 0, 2, 1, 0, 3], [0, 10, 0, 0, 0, 0], [1, 2, 1, 0, 4, 1]], np.int32)
X = np.arange(1, 1 + DEVICES * ROWS * DIM, dtype=np.float32).reshape(DEVICES, ROWS, DIM)


def everywhere(function: Any, *args: Any) -> Any:
    return jax.device_get(jax.jit(jax.vmap(function, axis_name="expert"))(*args))


def ragged_all_to_all(x: np.ndarray, out: np.ndarray, starts: Any, sent: Any, places: Any, received: Any) -> np.ndarray:
    """All devices' results, by the documentation of `jax.lax.ragged_all_to_all`; indexed [device][slice]."""
    out, each = out.copy(), starts.shape[1] // DEVICES
    for sender in range(DEVICES):
        for i in range(starts.shape[1]):
            receiver, size = i // each, sent[sender][i]
            assert size == received[receiver][sender * each + i % each]
            there, start = places[sender][i], starts[sender][i]
            out[receiver, there : there + size] = x[sender, start : start + size]
    return out


def round_trip(capacity: int, turn: int, into: np.ndarray) -> tuple[SendPlan, np.ndarray, np.ndarray]:
    """The plan of all devices, what they receive, and `into` with what comes back."""

    def there_and_back(x: jax.Array, into: jax.Array) -> Any:
        plan = plan_round(jnp.asarray(SIZES), turn, capacity, "expert")
        there = gathered_dispatch(x, plan, capacity=capacity, axis="expert")
        return plan, there, gathered_combine(there, into, plan, axis="expert")

    return everywhere(there_and_back, X, into)


def in_order(receiver: int) -> np.ndarray:
    """All rows for a device, by expert, then by sender."""
    starts = np.cumsum(SIZES, axis=1) - SIZES
    experts = range(2 * receiver, 2 * receiver + 2)
    return np.concatenate([X[s, starts[s, e] : starts[s, e] + SIZES[s, e]] for e in experts for s in range(DEVICES)])


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [17, 8, 5])
def test_every_row_reaches_its_expert_in_one_of_the_rounds_and_comes_back(capacity):
    received = [in_order(receiver) for receiver in range(DEVICES)]
    rounds = int(count_rounds(jnp.asarray(SIZES), capacity))
    assert rounds == -(-17 // capacity) == -(-max(map(len, received)) // capacity)
    back = np.zeros_like(X)
    for turn in range(rounds):
        before = back
        plan, there, back = round_trip(capacity, turn, before)
        for receiver in range(DEVICES):
            window = received[receiver][turn * capacity : (turn + 1) * capacity]
            np.testing.assert_array_equal(there[receiver, : len(window)], window)
            assert not there[receiver, len(window) :].any() and plan.sizes[receiver].sum() == len(window)
        # TPUs do it by a ragged all-to-all: the same rows in the same places.
        empty = np.zeros((DEVICES, capacity, DIM), np.float32)
        slices = (plan.starts, plan.sent, plan.places, plan.received)
        np.testing.assert_array_equal(ragged_all_to_all(X, empty, *slices), there)
        home = plan.starts.reshape(DEVICES, DEVICES, -1).transpose(1, 0, 2).reshape(DEVICES, -1)
        returning = (plan.blocks, plan.received, home, plan.sent)
        np.testing.assert_array_equal(ragged_all_to_all(there, before, *returning), back)
    np.testing.assert_array_equal(back[:2], X[:2])
    np.testing.assert_array_equal(back[2, :-1], X[2, :-1])
    assert not back[2, -1].any()


def test_each_way_is_the_gradient_of_the_other():
    """<dispatch(x), w> = <x, combine(w)> holds for any values."""

    def products(x: jax.Array, w: jax.Array) -> Any:
        plan = plan_round(jnp.asarray(SIZES), 1, 5, "expert")
        there = gathered_dispatch(x, plan, capacity=5, axis="expert")
        return jnp.sum(there * w), jnp.sum(x * gathered_combine(w, jnp.zeros_like(x), plan, axis="expert"))

    weights = np.random.default_rng(0).normal(size=(DEVICES, 5, DIM)).astype(np.float32)
    one, other = everywhere(products, X, weights)
    np.testing.assert_allclose(one.sum(), other.sum(), rtol=1e-5)
