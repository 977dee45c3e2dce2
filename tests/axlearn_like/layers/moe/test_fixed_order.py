"""Experts in a fixed order of sums: the equation, and the same bits in any batch and on any mesh (simulated)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.exact.scope import use_numerics
from axlearn_like.layers.moe.fixed_order import sum_of_experts
from mesh import UserError, make_mesh
from mesh.rules import constrain
from tests.elsewhere import elsewhere

EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
BATCH, DIM, EXPERTS, TOP_K, WIDTH = 8, 20, 4, 3, 64


def arrays() -> tuple[Any, ...]:
    """Return activations, experts, weights and matrices; one token is padding, and no token uses expert 2."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 1, DIM)).astype(np.float32)
    experts = np.array([rng.permutation([0, 1, 3]) for _ in range(BATCH)], np.int32)[:, None]
    experts[5] = EXPERTS
    weights = rng.random((BATCH, 1, TOP_K)).astype(np.float32)
    inner, outer = (EXPERTS, DIM, WIDTH), (EXPERTS, WIDTH, DIM)
    return x, experts, weights, *(rng.standard_normal(shape).astype(np.float32) for shape in (inner, inner, outer))


def computed(sizes: dict[str, int], rows: slice = slice(0, BATCH)) -> np.ndarray:
    """Return what the experts of some tokens add up to, on a mesh; {}: without one."""
    if not sizes:
        return _computed(rows)
    with jax.set_mesh(make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])):
        return _computed(rows)


def _computed(rows: slice) -> np.ndarray:
    @jax.jit
    def run(x: Any, experts: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        x, experts, weights = (constrain(one, "batch", None, None) for one in (x, experts, weights))
        gate, up = constrain(gate, None, None, "hidden"), constrain(up, None, None, "hidden")
        matrices = gate, up, constrain(down, None, "hidden", None)
        return sum_of_experts(x, experts, weights, matrices, lambda g, u: jnp.maximum(g, 0) * u, interpret=True)

    x, experts, weights, *matrices = arrays()
    with use_numerics("exact", interpret=True):
        return np.asarray(run(x[rows], experts[rows], weights[rows], *matrices))


def expected() -> np.ndarray:
    x, experts, weights, gate, up, down = (np.asarray(one, np.float64) for one in arrays())
    out = np.zeros_like(x)
    for token in range(BATCH):
        for expert, weight in zip(experts[token, 0].astype(int), weights[token, 0], strict=True):
            if expert < EXPERTS:
                units = np.maximum(x[token, 0] @ gate[expert], 0) * (x[token, 0] @ up[expert])
                out[token, 0] += weight * (units @ down[expert])
    return out


def on_meshes() -> list[Any]:
    return [computed(sizes).tolist() for sizes in ({"tensor": 8}, {"data": 2, "tensor": 4})]


@pytest.mark.slow
@pytest.mark.numerics
def test_neither_devices_nor_other_tokens_change_a_bit():
    alone, right = computed({}), expected()
    np.testing.assert_allclose(alone, right, atol=1e-5 * np.abs(right).max())
    for found in elsewhere(on_meshes, environ=EIGHT_DEVICES):
        np.testing.assert_array_equal(np.asarray(found, np.float32), alone)
    np.testing.assert_array_equal(computed({}, slice(3, 5)), alone[3:5])


def refused() -> str:
    with pytest.raises(UserError) as caught:
        computed({"expert": 2})
    return str(caught.value)


def test_experts_on_several_devices_are_refused():
    assert "the mesh shards experts; expected expert=1" in elsewhere(refused, environ=EIGHT_DEVICES)


def refused_width() -> str:
    globals()["WIDTH"] = 24  # parts of three rows, which no TPU can read
    with pytest.raises(UserError) as caught:
        computed({"tensor": 2})
    return str(caught.value)


def test_experts_that_are_too_narrow_for_the_devices_are_refused():
    found = elsewhere(refused_width, environ=EIGHT_DEVICES)
    assert "experts of 24 hidden units have sums of 1 parts, which 2 devices (tensor) cannot share" in found
    assert "a multiple of 16 hidden units" in found
