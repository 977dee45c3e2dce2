"""Several updates by one batch are one step of the state; no update leaves everything else as it is."""

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.training.updates.minibatches import MinibatchStep


@jax.jit
def step(state, batch):
    params = state["params"] - batch
    metrics = {"loss": jnp.sum(batch), "ratio_max": jnp.max(params), "lr": 1.0 + state["step"]}
    return {**state, "step": state["step"] + 1, "params": params}, metrics


def start():
    return {"step": jnp.int32(7), "params": jnp.arange(3.0)}


def test_each_minibatch_is_an_update_and_all_are_one_step():
    state, metrics = MinibatchStep(step)(start(), [jnp.float32(1.0), jnp.float32(2.0)])
    np.testing.assert_array_equal(state["params"], [-3.0, -2.0, -1.0])
    assert int(state["step"]) == 8
    found = {name: float(value) for name, value in metrics.items()}
    assert found == {"loss": 1.5, "ratio_max": 1.0, "lr": 9.0, "updates": 2.0}  # mean, largest, latest


def test_one_minibatch_has_the_metrics_of_its_step():
    state, metrics = MinibatchStep(step)(start(), [jnp.float32(1.0)])
    expected, alone = step(start(), jnp.float32(1.0))
    np.testing.assert_array_equal(state["params"], expected["params"])
    assert int(state["step"]) == 8 and float(metrics.pop("updates")) == 1
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in alone.items()}


def test_without_minibatches_only_the_step_counts():
    before = start()
    state, metrics = MinibatchStep(step)(before, [])
    assert state["params"] is before["params"] and int(state["step"]) == 8
    assert {k: float(v) for k, v in metrics.items()} == {"loss": 0.0, "updates": 0.0}


def test_a_batch_ends_after_the_update_that_says_so():
    until = MinibatchStep(step, until=lambda metrics: float(metrics["loss"]) > 1.5)
    state, metrics = until(start(), [jnp.float32(x) for x in (1.0, 2.0, 4.0)])
    np.testing.assert_array_equal(state["params"], [-3.0, -2.0, -1.0])
    assert float(metrics["updates"]) == 2
