"""Rows cut over devices: gathered keys and a ring give what one device gives, gradients too."""

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.context_parallel import zigzag
from mesh import UserError
from tests.axlearn_like.kernels.attention.context_parallel.sharded import differences
from tests.bounds import within
from tests.elsewhere import elsewhere

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.mark.numerics
@pytest.mark.full  # a whole model's ring is in tests/axlearn_like/training/test_step_mesh.py
def test_eight_devices_give_what_one_gives():
    found = elsewhere(differences, environ={"XLA_FLAGS": QUICK}, timeout=600)
    assert len(found) == 12
    assert within(max(found.values()), 2e-6), found


@pytest.mark.slow
def test_zigzag_gives_each_device_an_early_and_a_late_chunk():
    assert zigzag.order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    for length, cp_size in ((24, 2), (32, 4), (6, 3)):
        order = zigzag.order(length, cp_size)
        np.testing.assert_array_equal(order[zigzag.inverse(length, cp_size)], np.arange(length))
        pairs = (order.reshape(cp_size, -1) + 1).sum(axis=1)  # keys that the queries of each device see
        assert len(set(pairs.tolist())) == 1
        rows = np.arange(2 * length).reshape(2, length)
        np.testing.assert_array_equal(zigzag.restore(jnp.asarray(rows[:, order]), cp_size, "zigzag"), rows)


def test_rows_that_cannot_be_cut_are_refused():
    with pytest.raises(UserError, match="rows of 20 tokens do not divide over .* sequence 4: .* of 8, such as 16"):
        zigzag.order(20, 4)
