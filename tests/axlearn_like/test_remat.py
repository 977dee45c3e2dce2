"""Results stored for the backward pass are those of the mapping, and the values do not depend on it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.dispatch import AttentionParams, attend
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.attention.splash import Splash
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import bind
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.remat import NAMES, PRESETS, checkpoint, checkpoint_name, find_remat
from mesh import UserError
from tests.axlearn_like.layers.small import initialise, small_decoder

ROWS, LENGTH = 2, 6


def loss_of(remat):
    """A scalar function of the parameters of a small decoder."""
    graphdef, params = initialise(small_decoder(remat=remat))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (ROWS, LENGTH)), jnp.int32)
    positions = jnp.tile(jnp.arange(LENGTH), (ROWS, 1))
    context = PackedContext(positions, jnp.ones_like(positions))
    return lambda p: jnp.sum(bind(graphdef, p)(tokens, context) ** 2), params


def stored(remat) -> list[tuple[int, ...]]:
    """Shapes of what the forward pass leaves for the backward pass."""
    loss, params = loss_of(remat)
    return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params))]


def in_layers(shapes: list[tuple[int, ...]]) -> int:
    """How many arrays of every layer and token there are."""
    return sum(shape[:3] == (3, ROWS, LENGTH) for shape in shapes)


@pytest.mark.slow
def test_everything_recomputed_keeps_the_input_of_each_block_alone():
    assert in_layers(stored("everything")) == 1


def test_cosines_and_sines_are_stored_once_for_all_layers():
    shapes = stored("everything")
    assert shapes.count((ROWS, LENGTH, 4)) == 2  # half of a head
    assert not any(shape[0] == 3 and shape[-1] == 4 for shape in shapes if len(shape) > 1)


@pytest.mark.parametrize("names", [["context"], ["gate", "up"], ["query", "key", "value", "context"]])
def test_what_is_saved_is_stored_and_nothing_else(names):
    assert in_layers(stored(dict.fromkeys(names, "save"))) == 1 + len(names)


@pytest.mark.slow
def test_fewer_are_stored_than_without_rematerialisation():
    kept = [in_layers(stored(name)) for name in ("everything", "context", "attention", "products", "nothing")]
    assert kept == sorted(set(kept))


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any]:
    """Parameters, and the loss with its gradient where everything is stored."""
    loss, params = loss_of("nothing")
    return params, jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(
    "remat", [*(pytest.param(name, marks=pytest.mark.full) for name in ("everything", "products")), {"gate": "save"}]
)
def test_no_value_and_no_gradient_changes(remat, plain):
    params, expected = plain
    found = jax.jit(jax.value_and_grad(loss_of(remat)[0]))(params)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("remat, kernels", [("nothing", 3), ("context", 3), ("attention", 3), ("everything", 4)])
def test_attention_by_a_kernel_is_run_again_only_where_its_results_are_not_kept(remat, kernels):
    """A forward pass, one for the gradient of queries, one for those of keys and values; nothing is run here."""
    kernel = Splash.Config(interpret=True, fused_backward=False).build()
    attention = AttentionParams(ScoreRules(), kernel, AllGather.Config().build())

    def loss(x):
        q, k, v = (
            checkpoint_name(y, name) for y, name in zip(jnp.split(x, 3, axis=2), ("query", "key", "value"), strict=True)
        )
        return jnp.sum(attend(q[..., None, :], k, v, attention, segment_ids=jnp.ones((1, 128), jnp.int32)))

    x = jax.ShapeDtypeStruct((1, 128, 3, 128), jnp.float32)
    traced = jax.make_jaxpr(jax.grad(lambda x: checkpoint(loss, find_remat(remat))(x * 2)))(x)
    assert str(traced).count("pallas_call[") == kernels


def test_a_preset_mentions_only_names_that_layers_give():
    for preset in PRESETS.values():
        assert set(preset or ()) <= set(NAMES)


def test_unknown_names_are_refused_when_the_model_is_built():
    with pytest.raises(UserError, match=r"no preset 'everythin'; did you mean 'everything'"):
        initialise(small_decoder(remat="everythin"))
    with pytest.raises(UserError, match=r"no layer names an array 'contxt'; did you mean 'context'"):
        initialise(small_decoder(remat={"contxt": "save"}))
    with pytest.raises(UserError, match="remat"):
        small_decoder(remat={"context": "keep"})
    with pytest.raises(UserError, match=r"remat\['context'\] is 'keep'; expected 'save' or 'offload'"):
        find_remat({"context": "keep"})  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("names, more", [(("gate", "up"), 2), (("routing",), 3)])
def test_arrays_of_a_mixture_are_stored_by_name(names, more):
    """Experts' units are those of all rows; the choice is stored once for tokens and twice for the order of rows."""
    mixture = MoE.Config(num_experts=4, router=SoftmaxRouter.Config(top_k=2), experts=Experts.Config(hidden=20))
    block, rows = Block.Config(attention=Attention.Config(num_heads=4), feed_forward=mixture), 2 * ROWS * LENGTH

    def of_rows(remat) -> int:
        graphdef, params = initialise(small_decoder(remat=remat, block=block))
        tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
        context = PackedContext(jnp.tile(jnp.arange(LENGTH), (ROWS, 1)), jnp.ones_like(tokens))
        pull = jax.eval_shape(lambda p: jax.vjp(lambda p: jnp.sum(bind(graphdef, p)(tokens, context)), p)[1], params)
        shapes = [leaf.shape for leaf in jax.tree.leaves(pull)]
        return sum(shape[0] == 3 and math.prod(shape[1:]) in (20 * rows, rows) for shape in shapes if len(shape) > 1)

    assert of_rows(dict.fromkeys(names, "save")) == of_rows("everything") + more
