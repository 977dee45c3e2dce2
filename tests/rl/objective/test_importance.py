"""Detached weights pi_old / mu against loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh.errors import UserError
from rl.objective import NoImportance, Objective, RolloutRejection, TruncatedImportance
from rl.objective.tokens import gather_tokens


def random_tokens(seed: int = 0):
    rng = np.random.default_rng(seed)
    shape = (2, 3, 5)
    mask = rng.random(shape) < 0.8
    mask[0, 0] = False
    batch = {
        "logprobs_old": rng.normal(-1.0, 0.8, shape),
        "logprobs_behaviour": rng.normal(-1.0, 0.8, shape),
        "action_mask": mask,
        "weights": mask / mask.sum(),
        "advantages": rng.normal(size=shape[:-1]),
    }
    return rng.normal(-1.0, 0.8, shape), batch


def gather(new, batch):
    arrays = {k: jnp.asarray(v) for k, v in batch.items()}
    return gather_tokens(jnp.asarray(new), arrays, old_policy="recompute")


def by_loops(batch, level: str, mode: str, cap: float, floor: float):
    difference = batch["logprobs_old"] - batch["logprobs_behaviour"]
    mask = batch["action_mask"]
    weights, limited = np.zeros(mask.shape), np.zeros(mask.shape, bool)
    for row in np.ndindex(mask.shape[:-1]):
        steps = [t for t in range(mask.shape[-1]) if mask[row][t]]
        total = sum(difference[row][t] for t in steps)
        for t in steps:
            log_ratio = {
                "token": difference[row][t],
                "geometric": total / len(steps),
                "sequence": total,
            }[level]
            ratio = math.exp(log_ratio)
            limited[row][t] = not floor <= ratio <= cap
            kept = 0.0 if limited[row][t] else ratio
            weights[row][t] = kept if mode == "mask" else min(max(ratio, floor), cap)
    return weights, limited


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
@pytest.mark.parametrize("mode", ["clip", "mask"])
@pytest.mark.parametrize(("cap", "floor"), [(1.5, 0.0), (1.2, 0.6), (1e6, 0.0)])
def test_equals_the_formula(level, mode, cap, floor):
    new, batch = random_tokens()
    cfg = TruncatedImportance.Config(level=level, mode=mode, cap=cap, floor=floor)
    weights, limited = cfg.build()(gather(new, batch))
    expected_weights, expected_limited = by_loops(batch, level, mode, cap, floor)
    mask = batch["action_mask"]
    np.testing.assert_allclose(np.asarray(weights)[mask], expected_weights[mask], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(limited)[mask], expected_limited[mask])
    if cap < 2:
        assert expected_limited.any()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_no_gradient_reaches_the_policy(level):
    """No gradient flows even where pi_old is pi itself."""
    new, batch = random_tokens()
    arrays = {k: jnp.asarray(v) for k, v in batch.items()}
    importance = TruncatedImportance.Config(level=level).build()

    def total(x):
        tokens = gather_tokens(x, arrays, old_policy="current")
        return jnp.sum(importance(tokens)[0])

    assert not np.any(jax.grad(total)(jnp.asarray(new, jnp.float32)))


def test_is_one_when_the_sampler_is_the_trainer():
    new, batch = random_tokens()
    batch["logprobs_old"] = batch["logprobs_behaviour"]
    weights, limited = TruncatedImportance.Config(level="geometric").build()(gather(new, batch))
    np.testing.assert_array_equal(weights, 1.0)
    assert not np.any(limited)


def test_no_importance_is_one():
    new, batch = random_tokens()
    weights, limited = NoImportance.Config().build()(gather(new, batch))
    np.testing.assert_array_equal(weights, 1.0)
    assert not np.any(limited)


@pytest.mark.parametrize(("floor", "cap"), [(0.0, 0.9), (1.1, 2.0), (-0.1, 2.0)])
def test_limits_must_enclose_one(floor, cap):
    with pytest.raises(UserError, match="(floor: expected 0 to 1|cap: expected 1 or more), got "):
        TruncatedImportance.Config(floor=floor, cap=cap).build()


@pytest.mark.numerics
@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_rejection_drops_whole_rollouts_and_tells_how_much(level):
    """Against loops: rollouts outside the limits have weight zero, others the weights of the component within."""
    new, batch = random_tokens(4)
    within = TruncatedImportance.Config(cap=1.3)
    cap, floor = {"token": (6.0, 0.15), "geometric": (1.3, 0.8), "sequence": (3.0, 0.3)}[level]
    cfg = RolloutRejection.Config(level=level, cap=cap, floor=floor, weights=within)
    weights, limited = cfg.build()(gather(new, batch))
    _, outside = by_loops(batch, level, "mask", cap, floor)
    kept, clipped = by_loops(batch, "token", "clip", 1.3, 0.0)
    rejected = np.broadcast_to(outside.any(-1, keepdims=True), outside.shape)
    mask = batch["action_mask"]
    assert 0 < rejected[mask].mean() < 1
    np.testing.assert_allclose(np.asarray(weights)[mask], np.where(rejected, 0, kept)[mask], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(limited)[mask], (rejected | clipped)[mask])
    metrics = (
        Objective.Config(importance=cfg)
        .build()
        .loss(jnp.asarray(new), {k: jnp.asarray(v) for k, v in batch.items()})[1]
    )
    assert float(metrics["importance_dropped_fraction"]) == pytest.approx(rejected[mask].mean(), rel=1e-5)
