"""Experts that are read in the stack of all layers: what they compute of a slice of it, on one device or more."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.stacked_grouped_matmul import stacked_product
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.moe.experts import BiasedExperts, Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.matrix_forms import StackEntry
from axlearn_like.layers.wrappers.quantised import StoredWeights, stored_config, stored_params
from axlearn_like.layers.wrappers.stacked import keep_in_stack
from mesh import make_mesh, to_named_sharding
from mesh.rules import use_rules
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

X = np.random.default_rng(0).normal(1.0, size=(2, 6, 32)).astype(np.float32)
FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@contextlib.contextmanager
def by_kernel() -> Iterator[None]:
    """Read matrices in their stack by the kernel for TPUs, simulated, in what is traced within."""

    def simulated(x: jax.Array, stack: jax.Array, layer: jax.Array, sizes: jax.Array) -> jax.Array:
        return stacked_product(x, stack, layer, sizes, interpret=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("axlearn_like.layers.moe.experts.product_in_stack", simulated)
        yield


def outputs(graphdef: Any, params: Any) -> list[np.ndarray]:
    """Outputs of the experts of the third layer: cut out of the stack, read in it, and read in it by the kernel."""

    def run(stack: bool) -> np.ndarray:
        return np.asarray(jax.jit(lambda p: output(bind(graphdef, p).layers, 2, stack=stack))(params))

    found = [run(False), run(True)]
    with by_kernel():
        return [*found, run(True)]


def mixture(experts: Experts.Config) -> Decoder.Config:
    cfg = small_decoder()
    assert isinstance(cfg.block, Block.Config)
    cfg.block.feed_forward = MoE.Config(dim=32, num_experts=4, router=SoftmaxRouter.Config(top_k=2), experts=experts)
    return cfg


def output(layers: Any, index: int, *, stack: bool) -> jax.Array:
    """Output of the experts of a layer, read in the stack or cut out of it."""
    if not stack:
        return jax.tree.map(lambda leaf: leaf[index], layers).feed_forward(jnp.asarray(X))[0]
    rest, layer = keep_in_stack(layers, jnp.float32)
    assert layer is not None
    one = layer(jax.tree.map(lambda leaf: leaf[index], rest), jnp.int32(index))
    assert isinstance(one.feed_forward.experts.gate_edf[...], StackEntry)
    return one.feed_forward(jnp.asarray(X))[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Experts, pytest.param(BiasedExperts, marks=pytest.mark.full)])
def test_experts_in_a_stack_have_the_bits_of_those_cut_out(kind: type[Experts]):
    """The values, by the kernel for TPUs."""
    found = outputs(*initialise(mixture(kind.Config(hidden=24))))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_allclose(found[2], found[0], atol=2e-5)


def held_as(**how: Any) -> tuple[Any, Any]:
    """The model with feed-forward layers of eight-bit numbers, and its parameters."""
    cfg = mixture(Experts.Config(hidden=24))
    held = stored_config(cfg, StoredWeights.Config(layers=("feed_forward",), **how))
    return split(build_abstract(held))[0], stored_params(build_abstract(held), initialise(cfg)[1])


@pytest.mark.slow
def test_experts_of_int8_in_a_stack_are_those_cut_out():
    """The same bits without the kernel, and by it the values of their numbers and scales."""
    found = outputs(*held_as())
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_allclose(found[2], found[0], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"group": 8}, {"numbers": "int4"}, {"numbers": "fp8"}])
def test_experts_of_other_numbers_are_scanned_over(how: dict[str, Any]):
    assert keep_in_stack(bind(*held_as(**how)).layers, jnp.float32)[1] is None


def on_devices(int8: bool) -> float:
    """Largest difference of the last layer's experts on four devices, by the kernel, from one device."""
    cfg: Any = mixture(Experts.Config(hidden=24))
    graphdef, params = initialise(cfg)
    if int8:
        cfg = stored_config(cfg, StoredWeights.Config(layers=("feed_forward",)))
        graphdef, params = held_as()
    right = jax.jit(lambda p: output(bind(graphdef, p).layers, 2, stack=False))(params)
    mesh = make_mesh({"tensor": 2, "expert": 2})
    with use_rules({"batch": ()}), jax.set_mesh(mesh), by_kernel():
        sharded, described = split(build_abstract(cfg))
        placed = jax.tree.map(lambda p, a: jax.device_put(p, a.sharding), params, to_named_sharding(described, mesh))
        there = jax.jit(lambda p: output(bind(sharded, p).layers, 2, stack=True))(placed)
    return float(np.abs(there - right).max())


@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.full)])
def test_on_several_devices_each_reads_its_part_of_the_stack(int8: bool):
    assert within(elsewhere(on_devices, int8, environ=FOUR_DEVICES), 1e-5)


def test_what_no_kernel_reads_is_scanned_over_as_it_was():
    dense = bind(*initialise(small_decoder())).layers
    assert keep_in_stack(dense, jnp.float32) == (dense, None)
    experts = bind(*initialise(mixture(Experts.Config(hidden=24)))).layers
    assert keep_in_stack(experts, jnp.bfloat16)[1] is None  # to be cast, one layer at a time


@pytest.mark.slow
def test_a_layer_that_holds_other_matrices_as_numbers_gets_its_own():
    cfg = mixture(Experts.Config(hidden=24))
    held = stored_config(cfg, StoredWeights.Config(layers=("attention",)))
    graphdef, _ = split(build_abstract(held))
    layers = bind(graphdef, stored_params(build_abstract(held), initialise(cfg)[1])).layers
    rest, layer = keep_in_stack(layers, jnp.float32)
    assert layer is not None
    last = layer(jax.tree.map(lambda leaf: leaf[2], rest), jnp.int32(2))
    whole = jax.tree.leaves(split(layers.attention)[1])
    for found, right in zip(jax.tree.leaves(split(last.attention)[1]), whole, strict=True):
        np.testing.assert_array_equal(found, right[2])
