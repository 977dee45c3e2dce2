"""The balancing biases' own rule, in the learner, and what it does to a router's load."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.base import bind, split
from axlearn_like.layers.moe.router import SigmoidRouter
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.step import init_state, make_train_step

pytestmark = pytest.mark.numerics

LEARNER = Learner.Config(
    optimizer=AdamW.Config(weight_decay=0.5), schedule=Constant.Config(lr=0.1), clip_norm=1.0, balance_rate=0.01
)
PARAMS = {
    "layers": {"balance_bias_e": jnp.array([[0.3, -0.1, 0.0], [0.2, 0.0, 0.5]]), "w_de": jnp.ones((2, 4, 3))},
    "norm": {"scale": jnp.ones(4)},
}
LOADS = jnp.array([[2.0, -1.0, 0.0], [1e6, -1e-6, 0.5]])


def update(params: Any, grads: Any) -> Any:
    learner = LEARNER.build()
    return jax.jit(learner.update)(grads, learner.init(params), params)


@pytest.mark.slow
def test_a_bias_takes_a_fixed_step_against_the_excess_of_its_load():
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    grads["layers"]["balance_bias_e"] = LOADS
    params, _, _ = update(PARAMS, grads)
    expected = PARAMS["layers"]["balance_bias_e"] - 0.01 * jnp.sign(LOADS)
    np.testing.assert_allclose(params["layers"]["balance_bias_e"], expected, rtol=1e-6)


def test_the_loads_change_nothing_else():
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    changed = []
    for loads in (LOADS, jnp.zeros_like(LOADS)):
        grads["layers"]["balance_bias_e"] = loads
        params, state, metrics = update(PARAMS, grads)
        del params["layers"]["balance_bias_e"], metrics["update_norm"]
        changed.append((params, state, metrics))
    jax.tree.map(np.testing.assert_array_equal, *changed)
    np.testing.assert_allclose(changed[0][2]["grad_norm"], np.sqrt(28), rtol=1e-6)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_moves_no_bias():
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    grads["layers"]["balance_bias_e"], grads["norm"]["scale"] = LOADS, jnp.full(4, jnp.nan)
    params, _, _ = update(PARAMS, grads)
    np.testing.assert_array_equal(params["layers"]["balance_bias_e"], PARAMS["layers"]["balance_bias_e"])


@pytest.mark.slow
def test_a_lopsided_router_is_balanced_by_its_bias_alone_however_the_batch_is_cut():
    cfg = SigmoidRouter.Config(dim=6, num_experts=8, top_k=2, sequence_balance=0.0)
    graphdef, params = split(cfg.build(rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(1.0, size=(16, 32, 6)).astype(np.float32)

    def loss(params: Any, batch: Any) -> Any:
        routed = bind(graphdef, params)(batch["x"])
        share = batch["x"].shape[0] / len(x)  # additive over slices, as the supervised loss is
        return share * routed.losses["balance_bias"], {"load": share * routed.metrics["expert_load_max"]}

    ends, biases = [], []
    for microbatches in (1, 4):
        # Without decay the matrix, which has no gradient, stays as it is.
        learner = LEARNER.clone(optimizer=AdamW.Config()).build()
        step = make_train_step(loss, learner, microbatches)
        state, loads = init_state(jax.tree.map(jnp.copy, params), learner), []
        for _ in range(100):
            state, metrics = step(state, {"x": x})
            loads.append(float(metrics["load"]))
        ends.append(loads)
        biases.append(np.asarray(state["params"]["balance_bias_e"]))
    assert ends[0][0] > 2 and ends[0][-1] < 1.2
    np.testing.assert_allclose(biases[1], biases[0], atol=1e-6)
