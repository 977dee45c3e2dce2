from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.learner import AdamW, Constant, Learner, ParameterGroup
from axlearn_like.learner.schedules import GivenRate
from axlearn_like.training.step import AccumulatedStep, at_rate, init_state, make_train_step
from axlearn_like.training.updates.programs import ProgramCall, run_together
from mesh import make_mesh
from mesh.errors import UserError


def linear_loss(params, batch):
    """Weighted squares of a linear map: additive, with weights normalised over the whole batch."""
    error = (batch["x"] @ params["w"] - batch["y"]) * batch["scale"]
    loss = jnp.sum(batch["weights"] * error**2)
    return loss, {"loss": loss, "tokens": jnp.sum(batch["weights"] > 0, dtype=jnp.int32)}


def learner() -> Learner:
    return Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=0.1), clip_norm=None).build()


def make_batch(rows: int, mask: np.ndarray, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, 3)).astype(np.float32),
        "y": rng.normal(size=(rows, 2)).astype(np.float32),
        "weights": (mask / max(mask.sum(), 1)).astype(np.float32),
        "scale": np.float32(2.0),
    }


def fresh(seed: int = 0):
    w = np.random.default_rng(seed).normal(size=(3, 2)).astype(np.float32)
    return init_state({"w": jnp.asarray(w)}, learner())


STEPS = {count: make_train_step(linear_loss, learner(), count) for count in (1, 2, 3, 4, 6, 12)}


@pytest.mark.slow
@pytest.mark.numerics
@settings(max_examples=25, deadline=None)
@given(
    microbatches=st.sampled_from([2, 3, 4, 6, 12]),
    live=st.lists(st.booleans(), min_size=24, max_size=24),
)
def test_any_split_has_the_gradient_of_the_whole_batch(microbatches, live):
    batch = make_batch(12, np.reshape(live, (12, 2)))
    whole, whole_metrics = STEPS[1](fresh(), batch)
    split, split_metrics = STEPS[microbatches](fresh(), batch)
    for name in ("loss", "tokens", "grad_norm"):
        np.testing.assert_allclose(whole_metrics[name], split_metrics[name], rtol=1e-5)
    # Adam's first moment is (1 - b1) times the gradient itself.
    for a, b in zip(jax.tree.leaves(whole["opt_state"]), jax.tree.leaves(split["opt_state"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_trace_for_all_steps_and_the_state_is_donated(microbatches):
    traces = []

    def counted(params, batch):
        traces.append(1)
        return linear_loss(params, batch)

    step = make_train_step(counted, learner(), microbatches)
    first = state = fresh()
    for seed in range(4):
        state, _ = step(state, make_batch(6, np.ones((6, 2)), seed))
    assert len(traces) == 1
    assert int(state["step"]) == 4
    assert first["params"]["w"].is_deleted()


def test_a_bad_batch_is_skipped_but_counted_as_consumed():
    step = make_train_step(linear_loss, learner(), 2)
    batch = make_batch(4, np.ones((4, 2)))
    broken = {**batch, "x": np.full_like(batch["x"], np.nan)}
    state = fresh()
    before = np.asarray(state["params"]["w"])
    state, metrics = step(state, broken)
    np.testing.assert_array_equal(state["params"]["w"], before)
    assert (int(state["step"]), int(metrics["skipped"])) == (1, 1)


def test_a_batch_that_does_not_divide_is_refused():
    step = make_train_step(linear_loss, learner(), 4)
    with pytest.raises(UserError, match="6 rows does not divide into 4 microbatches"):
        step(fresh(), make_batch(6, np.ones((6, 2))))
    with pytest.raises(UserError, match="microbatches"):
        make_train_step(linear_loss, learner(), 0)


@pytest.mark.slow
@pytest.mark.numerics
def test_it_runs_under_a_mesh():
    batch = make_batch(4, np.ones((4, 2)))
    expected, _ = make_train_step(linear_loss, learner())(fresh(), batch)
    with jax.set_mesh(make_mesh({"fsdp": -1}, jax.devices()[:1])):
        state, _ = make_train_step(linear_loss, learner(), 2)(fresh(), batch)
    np.testing.assert_allclose(state["params"]["w"], expected["params"]["w"], rtol=2e-5)


@pytest.mark.slow
def test_no_gradient_is_summed_of_frozen_parameters_which_stay_as_they_are():
    """The same goes for what jax cannot differentiate, such as int8 numbers."""
    groups = (ParameterGroup.Config(match="base", frozen=True),)
    optimizer = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=0.1), groups=groups).build()
    params = {"w": jnp.ones((3, 2)), "base": jnp.full((3, 2), 3, jnp.int8)}
    batch = make_batch(4, np.ones((4, 2)))

    def loss(params, batch):
        return linear_loss({"w": params["w"] + params["base"].astype(jnp.float32)}, batch)

    accumulated = AccumulatedStep(loss, optimizer)
    assert list(accumulated.empty(params, batch)["grads"]) == ["w"]
    summed, _ = accumulated(init_state(params, optimizer), [batch])
    params = {"w": jnp.ones((3, 2)), "base": jnp.full((3, 2), 3, jnp.int8)}
    stepped, metrics = make_train_step(loss, optimizer, 2)(init_state(params, optimizer), batch)
    np.testing.assert_allclose(summed["params"]["w"], stepped["params"]["w"], rtol=1e-6)
    assert not np.allclose(stepped["params"]["w"], 1.0) and metrics["grad_norm"] > 0
    assert stepped["params"]["base"].dtype == jnp.int8 and (stepped["params"]["base"] == 3).all()


@pytest.mark.parametrize("accumulated", [False, True])
def test_frozen_parameters_stay_in_the_same_memory_and_are_not_donated(accumulated: bool):
    """Two learners of one base: each updates its own, neither takes the base from the other."""
    groups = (ParameterGroup.Config(match="base", frozen=True),)
    optimizer = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=0.1), groups=groups).build()
    base = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)), jnp.float32).at[0, 0].set(-0.0)
    batch = make_batch(4, np.ones((4, 2)))

    def loss(params, batch):
        return linear_loss({"w": params["w"] + params["base"]}, batch)

    step: Any = AccumulatedStep(loss, optimizer) if accumulated else make_train_step(loss, optimizer)
    before, where = np.asarray(base).tobytes(), base.unsafe_buffer_pointer()
    for seed in range(2):
        first = init_state({"w": jnp.full((3, 2), seed, jnp.float32), "base": base}, optimizer)
        state, _ = step(first, [batch] if accumulated else batch)
        assert state["params"]["base"].unsafe_buffer_pointer() == where
        assert first["params"]["w"].is_deleted() and not np.allclose(state["params"]["w"], seed)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first["opt_state"]))
    assert np.asarray(base).tobytes() == before
    moved = step.update if accumulated else step
    program = moved.trace(first, {"grads": {"w": base}, "metrics": {}} if accumulated else batch)
    assert len(jax.tree.leaves(program.out_info[0]["params"])) == 1, "the program returns no frozen parameter"


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("accumulated", [False, True])
def test_updates_call_by_call_in_one_loop_have_the_bits_of_each_alone_and_are_those_of_the_step(accumulated: bool):
    """Three learners of one base, at rates of their own, each with two microbatches."""
    groups = (ParameterGroup.Config(match="base", frozen=True),)
    optimizer = Learner.Config(optimizer=AdamW.Config(), schedule=GivenRate.Config(), groups=groups).build()
    base = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)), jnp.float32)

    def loss(params, batch):
        return linear_loss({"w": params["w"] + params["base"]}, batch)

    shared: Any = AccumulatedStep(loss, optimizer) if accumulated else make_train_step(loss, optimizer, 2)
    steps = [at_rate(shared, Constant.Config(lr=0.1 * (1 + seed)).build()) for seed in range(3)]

    def arguments(seed: int) -> tuple[Any, Any]:
        state = init_state({"w": jnp.full((3, 2), seed, jnp.float32), "base": base}, optimizer)
        rows = [make_batch(4, np.ones((4, 2)), seed=2 * seed + part) for part in range(2)]
        return state, rows if accumulated else rows[0]

    together = _updated_together([step.calls(*arguments(seed)) for seed, step in enumerate(steps)], 4)
    for seed, step in enumerate(steps):
        (alone,) = _updated_together([step.calls(*arguments(seed))], 2)
        jax.tree.map(np.testing.assert_array_equal, together[seed], alone)
        expected = step(*arguments(seed))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), together[seed], expected)
        assert together[seed][0]["params"]["base"] is base
    assert len({float(metrics["lr"]) for _, metrics in together}) == 3


def _updated_together(updates: list[Any], width: int) -> list[Any]:
    results: list[Any] = [None] * len(updates)
    while True:
        found = [_sent(update, result) for update, result in zip(updates, results, strict=True)]
        if not isinstance(found[0], ProgramCall):
            return found
        assert len({call.shape for call in found}) == len({call.program for call in found}) == 1
        results = run_together(found, found[0].program.of_several(width), width)


def _sent(update: Any, result: Any) -> Any:
    try:
        return update.send(result)
    except StopIteration as end:
        return end.value
