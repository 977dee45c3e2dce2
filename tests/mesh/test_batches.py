"""Batches on the devices of one process; tests/mesh/test_process_group.py has two."""

import jax
import numpy as np
import pytest

from mesh import UserError, make_mesh, shard_batch
from mesh.batches import batch_partition, local_rows

# No array is ever put on it: there is one device.
EIGHT = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:1] * 8).abstract_mesh


def test_without_a_mesh_nothing_is_spread():
    x = np.ones((3, 2))
    np.testing.assert_array_equal(shard_batch({"x": x})["x"], x)
    assert local_rows(3).tolist() == [0, 1, 2]


def test_a_batch_is_copied_to_a_device_whole():
    batch = {"tokens": np.arange(12).reshape(4, 3), "weights": np.ones(4, np.float32), "scale": np.float32(2)}
    with jax.set_mesh(make_mesh({"fsdp": 1}, jax.devices()[:1])):
        put = shard_batch(batch)
        assert local_rows(4).tolist() == [0, 1, 2, 3]
    for name, x in batch.items():
        assert put[name].sharding.is_fully_replicated
        np.testing.assert_array_equal(put[name], x)


def test_rows_that_do_not_divide_are_refused_by_name():
    batch = {"tokens": np.zeros((8, 3)), "extra": {"weights": np.zeros((6, 3))}}
    with (
        jax.sharding.use_abstract_mesh(EIGHT),
        pytest.raises(UserError, match=r"extra\.weights has 6 rows, .* \(data 2 x fsdp 2\)"),
    ):
        shard_batch(batch)


def test_rows_that_cannot_be_cut_over_a_sequence_axis_are_refused_by_name():
    mesh = make_mesh({"fsdp": 2, "sequence": 4}, jax.devices()[:1] * 8).abstract_mesh
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(UserError, match=r"tokens has 6 tokens in a row, which do not divide .* \(sequence 4\)"),
    ):
        shard_batch({"tokens": np.zeros((8, 6))})


def test_arrays_that_are_not_split_by_length_are_complete_on_the_devices_that_share_rows():
    mesh = make_mesh({"fsdp": 2, "sequence": 4}, jax.devices()[:1] * 8).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        assert batch_partition((8, 6, 2), "first", by_length=False) == jax.P("fsdp", None, None)
        assert batch_partition((8, 4), "tokens") == jax.P("fsdp", "sequence")
