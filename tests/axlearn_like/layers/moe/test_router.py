"""Routers against numpy in float64, token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.base import bind
from axlearn_like.layers.moe.router import Routed, SigmoidRouter, SoftmaxRouter
from mesh import UserError
from tests.axlearn_like.layers import reference
from tests.axlearn_like.layers.small import initialise
from tests.bounds import within

pytestmark = pytest.mark.numerics

DIM, EXPERTS = 12, 8
X = (2 * np.random.default_rng(5).normal(size=(2, 9, DIM))).astype(np.float32)


def route(cfg: Any, params: Any = None, routing: Any = None, x: Any = X) -> Routed:
    graphdef, drawn = initialise(cfg.clone(dim=DIM, num_experts=EXPERTS))
    return jax.jit(lambda p, x, r: bind(graphdef, p)(x, r))(params or drawn, x, routing)


def logits(cfg: Any) -> np.ndarray:
    _, params = initialise(cfg.clone(dim=DIM, num_experts=EXPERTS))
    return X.astype(np.float64) @ np.asarray(params["weight_de"], np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_takes_the_likeliest(renormalise):
    cfg = SoftmaxRouter.Config(top_k=3, renormalise=renormalise, load_balance=0.5, z_loss=0.25)
    routed = route(cfg)
    chosen = np.zeros(EXPERTS)
    probs = np.apply_along_axis(reference.softmax, -1, logits(cfg))
    for place in np.ndindex(2, 9):
        best = np.argsort(-probs[place])[:3]
        np.testing.assert_array_equal(routed.experts[place], best)
        weights = probs[place][best] / (probs[place][best].sum() if renormalise else 1.0)
        np.testing.assert_allclose(routed.weights[place], weights, rtol=1e-5)
        chosen[best] += 1
    balance = EXPERTS * np.sum(chosen / chosen.sum() * probs.mean((0, 1)))
    z = np.mean(np.log(np.exp(logits(cfg)).sum(-1)) ** 2)
    np.testing.assert_allclose(routed.losses["load_balance"], 0.5 * balance, rtol=1e-5)
    np.testing.assert_allclose(routed.losses["router_z"], 0.25 * z, rtol=1e-5)
    np.testing.assert_allclose(routed.metrics["expert_load_max"], chosen.max() / chosen.mean(), rtol=1e-6)
    entropy = -np.mean(np.sum(probs * np.log(probs), -1))
    np.testing.assert_allclose(routed.metrics["router_entropy"], entropy, rtol=1e-5)


def test_sigmoid_chooses_with_the_bias_and_weighs_without_it():
    cfg = SigmoidRouter.Config(top_k=3, scale=2.5, sequence_balance=0.5)
    _, params = initialise(cfg.clone(dim=DIM, num_experts=EXPERTS))
    assert params["balance_bias_e"].shape == (EXPERTS,)
    params["balance_bias_e"] = jnp.where(jnp.arange(EXPERTS) == 5, 10.0, params["balance_bias_e"])
    routed = route(cfg, params)
    scores, bias = 1 / (1 + np.exp(-logits(cfg))), np.asarray(params["balance_bias_e"], np.float64)
    losses = []
    for row in range(2):
        chosen = np.zeros(EXPERTS)
        for t in range(9):
            best = np.argsort(-(scores[row, t] + bias))[:3]
            np.testing.assert_array_equal(routed.experts[row, t], best)
            weights = 2.5 * scores[row, t][best] / scores[row, t][best].sum()
            np.testing.assert_allclose(routed.weights[row, t], weights, rtol=1e-5)
            chosen[best] += 1
        shares = scores[row] / scores[row].sum(-1, keepdims=True)
        losses.append(EXPERTS * np.sum(chosen / chosen.sum() * shares.mean(0)))
    assert (np.asarray(routed.experts)[..., 0] == 5).all()
    np.testing.assert_allclose(routed.losses["sequence_balance"], 0.5 * np.mean(losses), rtol=1e-5)
    assert routed.losses["balance_bias"] == 0


@pytest.mark.slow
def test_only_experts_of_the_best_groups_are_taken():
    cfg = SigmoidRouter.Config(top_k=3, groups=4, groups_kept=2)
    _, params = initialise(cfg.clone(dim=DIM, num_experts=EXPERTS))
    routed, scores = route(cfg), 1 / (1 + np.exp(-logits(cfg)))
    changed = 0
    for place in np.ndindex(2, 9):
        choice = scores[place] + np.asarray(params["balance_bias_e"])
        groups = np.argsort(-choice.reshape(4, 2).sum(-1))[:2]
        seen = np.where(np.isin(np.arange(8) // 2, groups), choice, -np.inf)
        best = np.argsort(-seen)[:3]
        np.testing.assert_array_equal(routed.experts[place], best)
        changed += set(best) != set(np.argsort(-choice)[:3])
    assert changed > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "loss", "parameter"),
    [
        (SoftmaxRouter.Config(top_k=2, load_balance=0.1), "load_balance", "weight_de"),
        (SoftmaxRouter.Config(top_k=2, z_loss=0.1), "router_z", "weight_de"),
        (SigmoidRouter.Config(top_k=2, sequence_balance=0.1), "sequence_balance", "weight_de"),
        (SigmoidRouter.Config(top_k=2, z_loss=0.1), "router_z", "weight_de"),
        (SigmoidRouter.Config(top_k=2), "balance_bias", "balance_bias_e"),
    ],
)
def test_every_declared_loss_has_a_gradient_on_the_router(cfg, loss, parameter):
    graphdef, params = initialise(cfg.clone(dim=DIM, num_experts=EXPERTS))
    grads = jax.jit(jax.grad(lambda p: bind(graphdef, p)(X).losses[loss]))(params)
    assert np.abs(grads[parameter]).max() > 1e-4
    others = [name for name in grads if name != parameter]
    assert all(not np.any(grads[name]) for name in others)


def test_weights_have_a_gradient_and_the_bias_has_none_of_theirs():
    graphdef, params = initialise(SigmoidRouter.Config(top_k=2, dim=DIM, num_experts=EXPERTS))
    grads = jax.jit(jax.grad(lambda p: jnp.sum(bind(graphdef, p)(X).weights ** 2)))(params)
    assert np.abs(grads["weight_de"]).max() > 1e-3 and not np.any(grads["balance_bias_e"])


def test_the_gradient_of_the_bias_is_the_excess_of_the_load():
    graphdef, params = initialise(SigmoidRouter.Config(top_k=2, dim=DIM, num_experts=EXPERTS))

    def loss(p: Any) -> tuple[jax.Array, jax.Array]:
        routed = bind(graphdef, p)(X)
        return routed.losses["balance_bias"], routed.experts

    grads, experts = jax.jit(jax.grad(loss, has_aux=True))(params)
    load = np.bincount(np.asarray(experts).ravel(), minlength=EXPERTS) / experts.size
    np.testing.assert_allclose(grads["balance_bias_e"], load * EXPERTS - 1, atol=1e-6)


@pytest.mark.slow
def test_a_balanced_router_has_a_loss_of_one():
    """Every expert equally likely for somebody: tokens are basis vectors, the weights a diagonal."""
    cfg = SoftmaxRouter.Config(top_k=1, load_balance=1.0)
    x = np.eye(DIM, dtype=np.float32)[None, :EXPERTS]
    routed = route(cfg, {"weight_de": 30 * jnp.eye(DIM, EXPERTS)}, x=x)
    np.testing.assert_allclose(routed.losses["load_balance"], 1.0, rtol=1e-6)
    assert routed.metrics["expert_load_max"] == 1 and within(routed.metrics["router_entropy"], 1e-6)
    all_to_one = route(cfg, {"weight_de": jnp.zeros((DIM, EXPERTS)).at[:, 3].set(30.0)}, x=x)
    np.testing.assert_allclose(all_to_one.losses["load_balance"], EXPERTS, rtol=1e-6)


@pytest.mark.slow
def test_given_experts_are_taken_with_todays_weights_and_gaps_are_chosen():
    cfg = SoftmaxRouter.Config(top_k=2)
    own = route(cfg)
    again = route(cfg, routing=own.experts)
    np.testing.assert_array_equal(again.weights, own.weights)
    forced = np.asarray(own.experts + 1) % EXPERTS
    forced[0, 3] = -1
    other = route(cfg, routing=forced)
    probs = np.apply_along_axis(reference.softmax, -1, logits(cfg))
    weights = np.take_along_axis(probs, forced, -1)
    weights[0, 3] = probs[0, 3][np.asarray(own.experts)[0, 3]]
    np.testing.assert_allclose(other.weights, weights / weights.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(other.experts[0, 3], own.experts[0, 3])
    np.testing.assert_array_equal(other.experts[1], forced[1])


def test_bfloat16_activations_are_routed_in_float32():
    routed = route(SoftmaxRouter.Config(top_k=2), x=jnp.asarray(X, jnp.bfloat16))
    assert {routed.weights.dtype, routed.losses["load_balance"].dtype} == {jnp.dtype("float32")}
    exact = route(SoftmaxRouter.Config(top_k=2), x=np.asarray(jnp.asarray(X, jnp.bfloat16), np.float32))
    np.testing.assert_array_equal(routed.weights, exact.weights)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (SoftmaxRouter.Config(top_k=9), "top_k: expected 1 to num_experts=8, got 9"),
        (SigmoidRouter.Config(top_k=2, groups=3), "groups: expected a divisor of num_experts=8, got 3"),
        (SigmoidRouter.Config(top_k=3, groups=4), "top_k: expected 1 to the 2 experts of groups_kept groups, got 3"),
    ],
)
def test_what_cannot_be_is_refused(cfg, message):
    with pytest.raises(UserError, match=message):
        cfg.clone(dim=DIM, num_experts=EXPERTS).build(rngs=nnx.Rngs(0))
