"""The table from logical axes to mesh axes, with a mesh and without."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from mesh import MESH_AXES, constrain, make_mesh, partition, to_named_sharding
from mesh.rules import LOGICAL_AXES, axis_sizes

ONE = make_mesh({"fsdp": 1}, jax.devices()[:1])
# No array is ever put on it: there is one device.
EIGHT = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:1] * 8).abstract_mesh


def test_every_rule_names_axes_of_the_mesh():
    for rule in LOGICAL_AXES.values():
        assert {rule} if isinstance(rule, str) else set(rule or ()) <= set(MESH_AXES)


def test_without_a_mesh_nothing_is_spread():
    x = jnp.ones((3, 2))
    assert partition("batch", None) is None
    assert axis_sizes("batch") == {}
    assert constrain(x, "batch", None) is x


def test_names_become_mesh_axes():
    with jax.sharding.use_abstract_mesh(EIGHT):
        assert partition("batch", None, "heads") == PartitionSpec(("data", "fsdp"), None, "tensor")
        assert partition("layers", "embed") == PartitionSpec(None, "fsdp")
        assert axis_sizes("batch") == {"data": 2, "fsdp": 2, "expert": 1}
        assert axis_sizes("heads") == {"tensor": 2}
        assert axis_sizes("layers") == {"pipeline": 1}


def test_an_unknown_name_is_an_error():
    with jax.sharding.use_abstract_mesh(EIGHT), pytest.raises(KeyError, match="head"):
        partition("head")


def test_what_is_newly_made_can_be_spread():
    with jax.sharding.use_abstract_mesh(EIGHT):
        made = jax.eval_shape(lambda: constrain(jnp.zeros((8, 3)), "batch", None))
    assert made.sharding.spec == PartitionSpec(("data", "fsdp"), None)


def test_axes_of_size_one_are_left_out_so_that_equal_partitions_are_written_equally():
    narrow = make_mesh({"fsdp": 2}, jax.devices()[:1] * 2).abstract_mesh
    with jax.sharding.use_abstract_mesh(narrow):
        assert partition("batch", "residual", "heads") == PartitionSpec("fsdp", None, None)


def test_abstract_shardings_get_devices():
    with jax.set_mesh(ONE):
        abstract = jax.eval_shape(lambda: {"w": constrain(jnp.zeros((4, 2)), "embed", None), "n": jnp.zeros(())})
    named = to_named_sharding(abstract, ONE)
    assert named["w"].sharding == jax.sharding.NamedSharding(ONE, PartitionSpec(None, None))
    assert named["n"].sharding.is_fully_replicated
    assert (named["w"].shape, named["w"].dtype) == ((4, 2), jnp.float32)
