"""Attention in one process and experts in another: both run one program, and have the gradients of one process."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.layers.parameter_names import path_name
from axlearn_like.training.updates.zebra.step import ZebraStep
from axlearn_like.training.updates.zebra.zebra import Zebra
from mesh.distributed import free_address
from mesh.rules import use_mesh
from tests.axlearn_like.layers.moe.test_moe_mesh import QUICK
from tests.axlearn_like.training.updates.zebra.test_step import mixture, trainer
from tests.bounds import within
from tests.elsewhere import elsewhere, in_two_processes

CFG = trainer(mixture(aux=0.01), zebra=Zebra.Config(mesh={"expert": 1}, microbatches=2, moved=(1, 0)))


def sums(tree: Any) -> dict[str, list[float]]:
    """Three numbers of every array that this process holds: its norm, its sum, and its last number."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    held = {path_name(path): np.asarray(x, np.float64).ravel() for path, x in leaves if x.is_fully_addressable}
    return {name: [float(np.linalg.norm(x)), float(x.sum()), float(x[-1])] for name, x in held.items()}


def placed(array: np.ndarray, where: Any) -> jax.Array:
    """An array on the devices of a sharding, of which this process may have none."""
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index], dtype=array.dtype)


def numbers(devices: int) -> dict[str, Any]:
    """Gradients and metrics, and the state after two updates, as far as this process holds them."""
    zebra = CFG.zebra
    assert zebra is not None
    mesh, learner = zebra.divide({}, jax.devices())[0], CFG.learner.build()
    with use_mesh(mesh):
        program = zebra.program(CFG, mesh, learner)
        step: Any = program.step
        assert isinstance(step, ZebraStep) and len(jax.devices()) == devices
        draw = np.random.default_rng(3)
        drawn = lambda x: placed(0.2 * draw.normal(size=x.shape).astype(np.float32), x.sharding)  # noqa: E731
        state = step.parted(step.begin(jax.tree.map(drawn, program.state["params"])))
        where = jax.NamedSharding(mesh, jax.P())
        batch = {name: placed(x, where) for name, x in next(CFG.input.build()).items()}
        grads, metrics = step.gradients(state, batch)
        for _ in range(2):
            state, metrics = step(state, batch)
        attention, experts = jax.block_until_ready(grads)
        found = {"attention": sums(attention), "experts": sums(experts), "metrics": sums(metrics)}
        return {**found, "state": sums(state)}


def one_process() -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", 2)
    return numbers(2)


def in_process(address: str, index: int, transfers: list[str]) -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cross_host_transfer_socket_address", transfers[index])
    jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0")
    jax.distributed.initialize(address, 2, index)
    return numbers(2)


@pytest.mark.full
@pytest.mark.numerics
def test_a_process_for_each_group_has_the_gradients_of_one_process():
    wanted = elsewhere(one_process, environ=QUICK)
    found = in_two_processes(in_process, [free_address(), free_address()], timeout=120)
    for part, holder in (("attention", 0), ("experts", 1), ("metrics", 0)):
        assert found[holder][part].keys() == wanted[part].keys() and not found[1 - holder][part], part
    state = found[0]["state"] | found[1]["state"]
    assert state.keys() == wanted["state"].keys()
    both = {**{part: found[holder][part] for part, holder in (("attention", 0), ("experts", 1))}, "state": state}
    for part, arrays in both.items():
        for name, values in arrays.items():
            apart = np.abs(np.subtract(values, wanted[part][name])) / max(1e-3, float(np.abs(wanted[part][name]).max()))
            assert within(float(apart.max()), 1e-3 if part == "state" else 1e-4), (part, name)
