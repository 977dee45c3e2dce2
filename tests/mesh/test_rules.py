"""The rules from logical axes to mesh axes, with a mesh and without."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from mesh import MESH_AXES, UserError, constrain, make_mesh, partition, to_named_sharding
from mesh.rules import DEFAULT_RULES, axis_sizes, check_rules, complete_rows, mesh_axes, use_mesh, use_rules

ONE = make_mesh({"fsdp": 1}, jax.devices()[:1])
# No array is ever put on it: there is one device.
EIGHT = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:1] * 8).abstract_mesh


def test_every_rule_names_axes_of_the_mesh():
    for rule in DEFAULT_RULES.values():
        assert {rule} if isinstance(rule, str) else set(rule or ()) <= set(MESH_AXES)


def test_without_a_mesh_nothing_is_sharded():
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


def test_a_new_array_can_be_sharded():
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


def test_changed_rules_hold_within_their_context_only():
    with jax.sharding.use_abstract_mesh(EIGHT):
        with use_rules({"embed": ("data", "fsdp"), "hidden": None}):
            assert partition("embed", "hidden", "heads") == PartitionSpec(("data", "fsdp"), None, "tensor")
            with use_rules(None):
                assert partition("embed") == PartitionSpec("fsdp")
        assert partition("embed", "hidden") == PartitionSpec("fsdp", "tensor")
    assert mesh_axes("batch", {"batch": "data"}) == ("data",) and mesh_axes("batch", {}) == ("data", "fsdp", "expert")


def test_complete_rows_shard_the_batch_over_the_axis_of_their_length():
    shared = make_mesh({"fsdp": 2, "sequence": 2, "tensor": 2}, jax.devices()[:1] * 8).abstract_mesh
    with jax.sharding.use_abstract_mesh(shared), use_rules({"embed": ("data", "fsdp")}):
        with complete_rows():
            assert partition("batch", "length") == PartitionSpec(("fsdp", "sequence"), None)
            assert partition("residual", "embed") == PartitionSpec("tensor", "fsdp"), "other rules stay"
        assert partition("batch", "length") == PartitionSpec("fsdp", "sequence")
    with jax.sharding.use_abstract_mesh(EIGHT), complete_rows():
        assert partition("batch", "length") == PartitionSpec(("data", "fsdp"), None)


def test_a_jitted_function_is_traced_again_under_other_rules():
    traced = []

    @jax.jit
    def sizes(x: jax.Array) -> jax.Array:
        traced.append(axis_sizes("embed"))
        return x

    for rules in ({}, {"embed": "data"}, {"embed": "fsdp"}, {"embed": ("data",)}):
        with use_mesh(ONE, rules):
            sizes(jnp.zeros(3))
    assert traced == [{"fsdp": 1}, {"data": 1}], "equal rules share a trace, however they are written"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"embedding": "fsdp"},
            "a rule for 'embedding', which is no logical axis; did you mean 'embed'?",
        ),
        ({"embed": "fdsp"}, "axis_rules.embed: the mesh has no axis 'fdsp'; did you mean 'fsdp'?"),
        ({"embed": ("fsdp", "fsdp")}, "axis_rules.embed: expected different mesh axes, got ('fsdp', 'fsdp')"),
        ({"experts": "tensor"}, "axis_rules.experts: expected 'expert' or None"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_rules(rules)
    with pytest.raises(UserError, match=re.escape(message)), use_rules(rules):
        pass
