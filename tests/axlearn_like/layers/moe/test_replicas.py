"""Replicas in a layer: the same results and gradients as one device, whatever the table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.layers.moe import replicas
from axlearn_like.layers.moe.placement import make_plan, slot_shares
from axlearn_like.layers.moe.replicas import Placement, placed, placed_layer, rows_by_slot
from tests.axlearn_like.layers.moe.test_moe_mesh import CFG, MESHES, QUICK, apart, results
from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

SIZES = st.lists(st.lists(st.integers(0, 9000), min_size=5, max_size=5), min_size=3, max_size=3)
by_slot = jax.jit(rows_by_slot)


@settings(max_examples=30, deadline=None)
@given(SIZES)
def test_rows_of_an_expert_are_shared_to_one_row_and_none_is_lost(sizes):
    found, devices, slots = np.array(sizes, np.int32), 3, 3
    plan = make_plan(found.sum(axis=0, keepdims=True), devices, slots)
    table = Placement(jnp.asarray(plan.experts[0]), jnp.asarray(plan.ends[0]))
    counts, starts = jax.device_get(by_slot(jnp.asarray(found), table))
    exact = found.sum(axis=0)[plan.experts[0]] * slot_shares(plan.experts, plan.ends)[0] / 4096
    assert np.all(np.abs(counts.sum(axis=0) - exact) < 1)
    for device in range(devices):  # a device's parts are all its rows, each once, within their expert's
        ends = np.cumsum(found[device])
        taken = np.concatenate([np.arange(s, s + c) for s, c in zip(starts[device], counts[device], strict=True)])
        assert np.array_equal(np.sort(taken), np.arange(ends[-1]))
        owners = [
            np.searchsorted(ends, np.arange(s, s + c), side="right")
            for s, c in zip(starts[device], counts[device], strict=True)
        ]
        assert all(np.all(o == e) for o, e in zip(owners, plan.experts[0], strict=True))


def ragged_all_to_all(x: jax.Array, out: jax.Array, *slices: jax.Array, axis_name: str) -> jax.Array:
    """The documented result of `jax.lax.ragged_all_to_all`, by gathering; what is sent must be what is expected."""
    starts, sent, places, received = (jax.lax.all_gather(a, axis_name) for a in slices)
    rows, me = jax.lax.all_gather(x, axis_name), jax.lax.axis_index(axis_name)
    devices, each = starts.shape[0], starts.shape[1] // starts.shape[0]
    for sender in range(devices):
        for k in range(each):
            slot = me * each + k
            agreed = sent[sender, slot] == received[me, sender * each + k]
            row = jnp.where(agreed, rows[sender, starts[sender, slot]], jnp.nan)
            out = jnp.where(sent[sender, slot] > 0, out.at[places[sender, slot]].set(row), out)
    return out


@pytest.mark.slow
def test_tpus_send_each_slot_its_expert_and_add_gradients_up_as_others_do(monkeypatch: pytest.MonkeyPatch):
    """Two experts on each of two devices, three slots; numbers that are exact in one order alone."""
    weights = np.random.default_rng(0).normal(size=(2, 2, 5, 3)).astype(np.float32)
    grads = np.random.default_rng(1).normal(size=(2, 3, 5, 3)).astype(np.float32)

    def run(one: Any, **options: Any) -> Any:
        function = functools.partial(one, axis="expert", **options)
        return jax.jit(jax.vmap(function, in_axes=(0, None), axis_name="expert"))

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)  # CPUs have none
    there = [run(one) for one in (replicas._ragged_to_slots, replicas.gathered_to_slots)]
    home = [run(one, own=2) for one in (replicas._ragged_to_home, replicas.gathered_to_home)]
    for table in ([0, 3, 1, 1, 2, 1], [0, 1, 2, 3, 3, 3], [3, 2, 3, 1, 0, 3]):
        experts = jnp.asarray(table, jnp.int32)
        for one in there:
            np.testing.assert_array_equal(one(weights, experts).reshape(6, 5, 3), weights.reshape(4, 5, 3)[table])
        expected = np.zeros((4, 5, 3), np.float32)
        for slot, expert in enumerate(table):  # one after the other, in the order of slots
            expected[expert] = expected[expert] + grads.reshape(6, 5, 3)[slot]
        for one in home:
            np.testing.assert_array_equal(one(grads, experts).reshape(4, 5, 3), expected)


def compare_replicas() -> dict[str, Any]:
    """Differences from one device, with a table by load, in several rounds."""
    jax.config.update("jax_num_cpu_devices", 8)
    with placed(Placement(jnp.zeros(8, jnp.int32), jnp.zeros(8, jnp.int32))):  # one device computes by no table
        expected, _ = results(None, CFG)
    plan = make_plan(expected["metrics"]["expert_load_by_layer"][None], 4, 4)
    with placed(Placement(jnp.asarray(plan.experts[0]), jnp.asarray(plan.ends[0]))):
        cfg = CFG.clone(experts=CFG.experts.clone(capacity_factor=0.5))
        there, _ = results(MESHES["expert_fsdp"], cfg)
    return {**apart(expected, there), "rounds": float(there["metrics"]["expert_rounds_max"])}


def assert_as_one_device(found: dict[str, Any]) -> None:
    differences = {key: found[key] for key in ("loss", "y", "losses", "metrics", "grads")}
    del differences["metrics"]["expert_rounds_max"]
    assert within(max(jax.tree.leaves(differences)), 1e-5), differences


def test_outputs_losses_and_gradients_are_those_of_one_device_without_replicas():
    found = elsewhere(compare_replicas, environ=QUICK)
    assert_as_one_device(found)
    # Half of the mean at a time: two rounds on devices that have the same load, where homes alone need three or more.
    assert found["rounds"] == 2


def test_layers_of_a_stack_have_their_rows_and_others_none():
    table = Placement(jnp.arange(6).reshape(2, 3), jnp.zeros((2, 3), jnp.int32))
    assert replicas.current_placement() is None
    with placed(table), placed_layer(jnp.int32(1)):
        one = replicas.current_placement()
        assert one is not None and one.experts.tolist() == [3, 4, 5]
    with placed(table), placed_layer(None):
        assert replicas.current_placement() is None
