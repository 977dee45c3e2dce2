"""Experts in slots against the same experts on one device, to the bit; rows by the shares of a plan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.placement import WHOLE, make_plan, slot_shares
from axlearn_like.layers.moe.replicas import Placement
from axlearn_like.layers.moe.slots import choose_slots, slotted
from mesh import make_mesh
from mesh.rules import use_rules
from tests.axlearn_like.layers.small import initialise
from tests.elsewhere import elsewhere

EXPERTS, TOP_K, DIM, DEVICES = 8, 3, 16, 4
CONFIG = Experts.Config(dim=DIM, num_experts=EXPERTS, hidden=8)
LOADS = np.random.default_rng(0).random((1, EXPERTS)) ** 3
PLAN = make_plan(LOADS, DEVICES, EXPERTS // DEVICES + 1)


def inputs() -> tuple[Any, Any, Any]:
    """Tokens, experts that are chosen unevenly, weights; one token is padding."""
    rng = np.random.default_rng(1)
    skewed = rng.random((3, 5, EXPERTS)) ** (1 / LOADS[0])
    experts = np.argsort(-skewed, axis=-1)[..., :TOP_K].astype(np.int32)
    experts[1, 2] = EXPERTS
    return jnp.asarray(rng.normal(size=(3, 5, DIM)), jnp.float32), experts, jnp.asarray(rng.random((3, 5, TOP_K)))


def on_devices() -> list[Any]:
    _, params = initialise(CONFIG)
    mesh, table = make_mesh({"expert": DEVICES}), PLAN.experts[0]
    with jax.set_mesh(mesh), use_rules({"batch": ()}):
        graphdef, _ = split(build_abstract(slotted(CONFIG, table.size)))
        by_slot = jax.NamedSharding(mesh, jax.P("expert"))
        held = {name: jax.device_put(np.asarray(leaf)[table], by_slot) for name, leaf in params.items()}
        held |= {"experts_s": table, "ends_s": PLAN.ends[0]}
        return jax.jit(lambda p, *args: bind(graphdef, p)(*args)[0])(held, *inputs()).tolist()


@pytest.mark.slow
@pytest.mark.numerics
def test_experts_in_slots_have_the_bits_of_one_device():
    """Experts of three to a token: without slots, sums of two devices' parts would be rounded otherwise."""
    assert (PLAN.replicas(EXPERTS) > 1).any()
    graphdef, params = initialise(CONFIG)
    alone = jax.jit(lambda p, *args: bind(graphdef, p)(*args)[0])(params, *inputs())
    found = elsewhere(on_devices, environ={"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"})
    np.testing.assert_array_equal(np.asarray(found, np.float32), alone)
    assert np.abs(alone).max() > 0.1


@pytest.mark.slow
def test_rows_go_to_the_slots_of_their_expert_by_its_shares():
    rng, table = np.random.default_rng(2), PLAN.experts[0]
    chosen = rng.choice(EXPERTS + 1, size=500, p=np.append(LOADS[0] / LOADS.sum() * 0.9, 0.1)).astype(np.int32)
    slots = np.asarray(
        choose_slots(jnp.asarray(chosen), EXPERTS, Placement(jnp.asarray(table), jnp.asarray(PLAN.ends[0])))
    )
    np.testing.assert_array_equal(slots == table.size, chosen == EXPERTS)
    routed = chosen < EXPERTS
    np.testing.assert_array_equal(table[slots[routed]], chosen[routed])
    amount = np.bincount(chosen, minlength=EXPERTS + 1)[table] * slot_shares(PLAN.experts, PLAN.ends)[0] / WHOLE
    assert np.abs(np.bincount(slots, minlength=table.size + 1)[:-1] - amount).max() <= 1
