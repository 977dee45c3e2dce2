"""The layer against numpy in float64, one token and one expert at a time; replay; and the same bits in any batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.base import bind
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter, SoftmaxRouter
from axlearn_like.layers.moe.routing import CHOOSE, PADDING
from axlearn_like.training.losses import SupervisedLoss
from mesh import UserError
from tests.axlearn_like.layers import reference
from tests.axlearn_like.layers.small import initialise, small_decoder

pytestmark = pytest.mark.numerics

DIM, EXPERTS = 12, 6
X = np.random.default_rng(1).normal(size=(3, 7, DIM)).astype(np.float32)
SOFTMAX = MoE.Config(
    dim=DIM,
    num_experts=EXPERTS,
    router=SoftmaxRouter.Config(top_k=2),
    experts=Experts.Config(hidden=20),
    record_routing=True,
)
SIGMOID = SOFTMAX.clone(router=SigmoidRouter.Config(top_k=3, scale=2.0), shared=SwiGLU.Config(hidden=10))


def run(cfg: MoE.Config) -> Any:
    """(jitted layer of (params, x, routing), params)."""
    graphdef, params = initialise(cfg)
    return jax.jit(lambda p, x, routing=None: bind(graphdef, p)(x, routing)), params


def brute_force(p: Any, experts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    p, out = reference.float64(p), np.zeros(X.shape)
    for place in np.ndindex(*X.shape[:2]):
        for expert, weight in zip(experts[place], weights[place], strict=True):
            one = {
                "gate_df": p["experts"]["gate_edf"][expert],
                "up_df": p["experts"]["up_edf"][expert],
                "down_fd": p["experts"]["down_efd"][expert],
            }
            out[place] += weight * reference.feed_forward(one, X[place].astype(np.float64))
    return out + (reference.feed_forward(p["shared"], X.astype(np.float64)) if "shared" in p else 0.0)


def softmax_weights(p: Any, experts: np.ndarray) -> np.ndarray:
    scores = X.astype(np.float64) @ np.asarray(p["router"]["weight_de"], np.float64)
    picked = np.exp(np.take_along_axis(scores, experts, -1))
    return picked / picked.sum(-1, keepdims=True)


@pytest.mark.slow
def test_softmax_experts_are_those_of_every_token_by_itself():
    layer, params = run(SOFTMAX)
    y, aux = layer(params, X)
    scores = X.astype(np.float64) @ np.asarray(params["router"]["weight_de"], np.float64)
    np.testing.assert_array_equal(aux.routing, np.argsort(-scores, axis=-1)[..., :2])
    experts = np.asarray(aux.routing)
    np.testing.assert_allclose(y, brute_force(params, experts, softmax_weights(params, experts)), atol=2e-6)
    assert aux.metrics.keys() == {"expert_load_max", "router_entropy", "expert_rounds_max"}
    assert aux.metrics["expert_rounds_max"] == 1


@pytest.mark.slow
def test_sigmoid_experts_and_the_shared_one_are_too():
    layer, params = run(SIGMOID)
    y, aux = layer(params, X)
    experts = np.asarray(aux.routing)
    scores = 1 / (1 + np.exp(-X.astype(np.float64) @ np.asarray(params["router"]["weight_de"], np.float64)))
    picked = np.take_along_axis(scores, experts, -1)
    np.testing.assert_allclose(y, brute_force(params, experts, 2.0 * picked / picked.sum(-1, keepdims=True)), atol=5e-6)


@pytest.mark.slow
def test_gradients_are_those_of_all_experts_computed_for_all_tokens():
    graphdef, params = initialise(SOFTMAX)
    dy = np.random.default_rng(2).normal(size=X.shape).astype(np.float32)

    def ours(p: Any, x: Any) -> jax.Array:
        return jnp.sum(bind(graphdef, p)(x)[0] * dy)

    def plain(p: Any, x: Any) -> jax.Array:
        scores = x @ p["router"]["weight_de"]
        limit = jnp.sort(scores, axis=-1)[..., -2:-1]
        weights = jax.nn.softmax(jnp.where(scores >= limit, scores, -jnp.inf), axis=-1)
        e = p["experts"]
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, e["gate_edf"]))
        hidden = hidden * jnp.einsum("btd,edf->btef", x, e["up_edf"])
        return jnp.sum(jnp.einsum("btef,efd,bte->btd", hidden, e["down_efd"], weights) * dy)

    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(params, X)
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(params, X)
    assert min(float(np.abs(gradient).max()) for gradient in jax.tree.leaves(expected)) > 1e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.slow
def test_replay_of_its_own_choice_changes_no_bit():
    for cfg in (SOFTMAX, SIGMOID):
        layer, params = run(cfg)
        y, aux = layer(params, X)
        again, _ = layer(params, X, aux.routing)
        np.testing.assert_array_equal(again, y)


@pytest.mark.slow
def test_replay_of_another_choice_forces_it_and_the_router_still_learns():
    graphdef, params = initialise(SOFTMAX)
    drawn = np.random.default_rng(3).random((*X.shape[:2], EXPERTS))
    forced = np.argsort(drawn, axis=-1)[..., :2].astype(np.int32)

    def total(p: Any) -> Any:
        y, aux = bind(graphdef, p)(X, forced)
        return jnp.sum(y**2), (y, aux.routing)

    grads, (y, routing) = jax.jit(jax.grad(total, has_aux=True))(params)
    np.testing.assert_array_equal(routing, forced)
    np.testing.assert_allclose(y, brute_force(params, forced, softmax_weights(params, forced)), atol=2e-6)
    assert np.abs(grads["router"]["weight_de"]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg", [pytest.param(SOFTMAX, id="softmax"), pytest.param(SIGMOID, id="sigmoid", marks=pytest.mark.full)]
)
def test_padding_has_no_expert_and_no_part_in_the_balance(cfg):
    router = cfg.router.set(z_loss=0.1)
    graphdef, params = initialise(cfg.clone(router=router))
    padded = np.full((4, 10, DIM), 7.0, np.float32)  # three tokens more in each row, and a row more
    padded[:3, :7] = X
    marks = np.full((4, 10, 1), PADDING, np.int32)
    marks[:3, :7] = CHOOSE

    def loss(p: Any, x: Any, routing: Any = None) -> Any:
        y, aux = bind(graphdef, p)(x, routing)
        return sum(aux.losses.values()), (y, aux)

    compute = jax.jit(jax.grad(loss, has_aux=True))
    gradient, (y, aux) = compute(params, X)
    with_padding, (y_padded, found) = compute(params, padded, marks)
    np.testing.assert_array_equal(y_padded[:3, :7], y)
    others = np.concatenate([y_padded[:3, 7:].reshape(-1, DIM), y_padded[3]])
    shared = 0.0 if "shared" not in params else others[0]  # what all tokens go through
    np.testing.assert_array_equal(others, np.broadcast_to(shared, others.shape))
    np.testing.assert_array_equal(found.routing[:3, :7], aux.routing)
    assert np.all(found.routing[:, 7:] == PADDING) and np.all(found.routing[3] == PADDING)
    for a, b in ((found.losses, aux.losses), (found.metrics, aux.metrics), (with_padding, gradient)):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-7), a, b)
    (nothing, (_, none)) = compute(params, padded, np.full_like(marks, PADDING))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves((nothing, none.losses)))


@pytest.mark.slow
def test_routing_is_kept_only_where_it_is_asked_for():
    layer, params = run(SOFTMAX.clone(record_routing=False))
    assert layer(params, X)[1].routing is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg", [pytest.param(SIGMOID, id="sigmoid"), pytest.param(SOFTMAX, id="softmax", marks=pytest.mark.full)]
)
def test_a_token_is_the_same_to_the_bit_alone_and_in_any_batch(cfg):
    """Engine and scoring agree to the bit (on CPUs in float32) only because of this."""
    layer, params = run(cfg)
    x = np.random.default_rng(4).normal(size=(9, 31, DIM)).astype(np.float32)
    together = np.asarray(layer(params, x)[0])
    np.testing.assert_array_equal(layer(params, x[2:3, 5:6])[0][0, 0], together[2, 5])
    np.testing.assert_array_equal(layer(params, x[::-1, :4])[0][::-1], together[:, :4])


@pytest.mark.slow
def test_a_decoder_adds_up_losses_and_returns_routing_by_layer():
    cfg = small_decoder(num_layers=2)
    assert isinstance(cfg.block, Block.Config)
    router = SoftmaxRouter.Config(top_k=2, load_balance=0.5, z_loss=0.1)
    cfg.block.feed_forward = SOFTMAX.clone(router=router).set(dim=cfg.dim)
    graphdef, params = initialise(cfg)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 6)).astype(np.int32)
    context = PackedContext(jnp.tile(jnp.arange(6), (2, 1)), jnp.ones((2, 6), jnp.int32))

    @jax.jit
    def forward(p: Any, routing: Any) -> Any:
        hidden = bind(graphdef, p).hidden(tokens, context, routing=routing)
        return hidden.x, hidden.aux

    x, aux = forward(params, jnp.full((2, 2, 6, 2), -1))  # all chosen by the router
    assert aux.routing.shape == (2, 2, 6, 2)
    assert 2 * 0.5 < aux.losses["load_balance"] < 2 * 0.5 * EXPERTS  # of both layers
    again, replayed = forward(params, aux.routing)
    np.testing.assert_array_equal(again, x)
    other, _ = forward(params, (aux.routing + 1) % EXPERTS)
    assert np.abs(other - x).max() > 1e-2
    loss = SupervisedLoss.Config().build()
    batch = {
        "tokens": tokens,
        "targets": tokens,
        "positions": context.positions,
        "segment_ids": context.segment_ids,
        "weights": jnp.full((2, 6), 1 / 24),  # half of the global batch
    }
    total, metrics = jax.jit(lambda p: loss(bind(graphdef, p), batch))(params)
    np.testing.assert_allclose(metrics["load_balance"], aux.losses["load_balance"] / 2, rtol=1e-5)
    np.testing.assert_allclose(total, metrics["loss"] + metrics["load_balance"] + metrics["router_z"], rtol=1e-6)
    np.testing.assert_allclose(metrics["expert_load_max"], aux.metrics["expert_load_max"], rtol=1e-6)


def test_a_factor_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"capacity_factor: expected above 0, or None, got 0\.0"):
        SOFTMAX.clone(experts=Experts.Config(hidden=4, capacity_factor=0.0)).build(rngs=nnx.Rngs(0))
