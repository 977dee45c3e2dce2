"""Arrays arrive whole, sharded as asked, whatever the sizes of both groups."""

from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.training.updates.zebra.transfer import transfer
from mesh import make_mesh
from tests.elsewhere import elsewhere


def sent() -> list[list[Any]]:
    jax.config.update("jax_num_cpu_devices", 12)
    found: list[list[Any]] = []
    array = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    devices, axes = jax.devices(), ("data", "tensor")
    for (rows, copies), others in product([(1, 1), (2, 1), (3, 2), (4, 1), (1, 2)], [1, 2, 3, 4, 6]):
        here = jax.NamedSharding(
            make_mesh(dict(zip(axes, (rows, copies), strict=True)), devices[: rows * copies]), jax.P("data")
        )
        there = jax.NamedSharding(make_mesh({"expert": others}, devices[6 : 6 + others]), jax.P("expert"))
        moved = transfer({"x": jax.device_put(array, here)}, there)["x"]
        found.append([rows, copies, others, moved.sharding == there, bool(np.array_equal(np.asarray(moved), array))])
    return found


@pytest.mark.slow
def test_rows_arrive_whole_on_groups_of_any_size():
    found = elsewhere(sent)
    assert len(found) == 25 and all(same and right for *_, same, right in found), found
