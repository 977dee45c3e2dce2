"""The decoder against numpy in float64: values, and gradients by differences of that reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.embedding import Head
from tests.axlearn_like.layers import reference
from tests.axlearn_like.layers.small import initialise, small_decoder

pytestmark = pytest.mark.numerics

TOKENS = np.array([[5, 17, 3, 39, 0, 8, 21, 8], [1, 2, 3, 4, 5, 6, 7, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 0]], np.int32)
SEGMENTS = np.array([[1] * 8, [1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
CONTEXT = PackedContext(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))
# A fixed random combination of the live logits stands for a loss.
MIX = np.random.default_rng(0).normal(size=(*TOKENS.shape, 40)) * (SEGMENTS > 0)[..., None] / 100


def loss(params, graphdef):
    return jnp.sum(bind(graphdef, params)(jnp.asarray(TOKENS), CONTEXT) * MIX.astype(np.float32))


def reference_loss(params) -> float:
    rows = zip(TOKENS, POSITIONS, SEGMENTS, strict=True)
    return float(sum(np.sum(reference.decoder(params, *row) * mix) for row, mix in zip(rows, MIX, strict=True)))


def logits(cfg: Decoder.Config) -> np.ndarray:
    graphdef, params = initialise(cfg)
    return np.asarray(jax.jit(lambda p: bind(graphdef, p)(jnp.asarray(TOKENS), CONTEXT))(params))


@functools.cache
def value_and_gradient(remat: str = "nothing", scan_unroll: int = 1):
    graphdef, params = initialise(small_decoder(remat=remat, scan_unroll=scan_unroll))
    return jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, graphdef)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_reference(tied):
    cfg = small_decoder(head=None if tied else Head.Config())
    params = reference.float64(initialise(cfg)[1])
    assert ("head" in params) != tied
    expected = [reference.decoder(params, *row) for row in zip(TOKENS, POSITIONS, SEGMENTS, strict=True)]
    live = SEGMENTS > 0
    np.testing.assert_allclose(logits(cfg)[live], np.asarray(expected)[live], atol=2e-5)


@pytest.mark.slow
def test_the_gradient_is_the_slope_of_the_reference():
    params = reference.float64(initialise(small_decoder())[1])
    leaves, treedef = jax.tree.flatten(params)
    value, grads = value_and_gradient()
    np.testing.assert_allclose(value, reference_loss(params), rtol=1e-5)
    grads = jax.tree.leaves(grads)
    rng = np.random.default_rng(1)
    for index, leaf in enumerate(leaves):
        # Along its own gradient, so that the slope is large, and a little to the side.
        direction = np.asarray(grads[index], np.float64)
        size = np.linalg.norm(direction)
        side = rng.normal(size=leaf.shape)
        direction = direction / size + 0.3 * side / np.linalg.norm(side)
        moved = ([*leaves[:index], leaf + step * direction, *leaves[index + 1 :]] for step in (1e-4, -1e-4))
        ahead, behind = (reference_loss(jax.tree.unflatten(treedef, new)) for new in moved)
        slope = float(np.sum(np.asarray(grads[index], np.float64) * direction))
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-4, rtol=1e-4, err_msg=str(index))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "scan_unroll"), [pytest.param("everything", 1, marks=pytest.mark.full), ("nothing", 3)]
)
def test_remat_and_unrolling_change_no_value(remat, scan_unroll):
    both = value_and_gradient(), value_and_gradient(remat, scan_unroll)
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_stack_that_is_unrolled_is_read_where_the_compiler_does_not_know():
    graphdef, params = initialise(small_decoder(scan_unroll=3))
    text = jax.jit(jax.grad(loss), static_argnums=1).lower(params, graphdef).as_text()
    depth = small_decoder().num_layers
    assert re.findall(rf"stablehlo.dynamic_slice .*tensor<{depth}x", text)
    assert not re.findall(rf"stablehlo.slice %\w+ \[1:2, .*tensor<{depth}x", text)


@pytest.mark.full  # test_remat.py counts what is stored in every run
def test_remat_keeps_less_for_the_backward_pass():
    def temporary_bytes(remat: str) -> int:
        graphdef, params = initialise(small_decoder(num_layers=8, remat=remat))
        compiled = jax.jit(jax.grad(loss), static_argnums=1).lower(params, graphdef).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes("everything") < 0.7 * temporary_bytes("nothing")


@pytest.mark.slow
def test_bfloat16_stays_near_float32():
    exact, rounded = logits(small_decoder()), logits(small_decoder(dtype="bfloat16"))
    live = SEGMENTS > 0
    assert rounded.dtype == np.float32
    error = np.abs(rounded - exact)[live]
    assert 1e-4 < error.mean() < 0.02 * exact[live].std()


@pytest.mark.slow
def test_one_trace_for_each_signature():
    graphdef, params = initialise(small_decoder())
    traces = []

    @jax.jit
    def call(params, tokens, context):
        traces.append(tokens.shape)
        return bind(graphdef, params)(tokens, context)

    for shift in range(3):
        call(params, jnp.asarray((TOKENS + shift) % 40), CONTEXT)
    short = PackedContext(CONTEXT.positions[:, :5], CONTEXT.segment_ids[:, :5])
    call(jax.tree.map(lambda x: x * 2, params), jnp.asarray(TOKENS[:, :5]), short)
    call(params, jnp.asarray(TOKENS[:, :5]), short)
    assert traces == [(2, 8), (2, 5)]
