"""Several updates by one batch against steps made by hand, with pi_old and the reference of the batch's start."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.learner import SGD, Constant, Learner
from axlearn_like.training.alignment.reference import FrozenCopy, MovingAverage
from rl.experiment import RLExperiment
from rl.objective import Objective, ReferenceKL, SequenceMean
from rl.objective.presets import grpo
from rl.protocol.headers import header_of
from rl.protocol.messages import Group
from rl.training.batching import PackedRows, PaddedRows, arrange
from rl.training.packing import Packing
from rl.training.program import policy_logprobs
from rl.training.spec import UpdateSpec
from rl.training.updates import Updates
from tests.bounds import within
from tests.rl.tiny import tiny_params
from tests.rl.training.batching.made import MAX_NEW, MAX_PROMPT, ragged
from tests.rl.training.test_trainer import STEPS, Roles, config, host
from tests.rl.training.whole_groups import pack_groups

TWICE = Updates.Config(minibatches=2, epochs=2)


def several(objective: Objective.Config, updates: Updates.Config = TWICE, **trainer: Any) -> RLExperiment.Config:
    cfg = config(objective=objective)
    cfg.trainer.set(updates=updates, **trainer)
    return cfg


# ---- mini-batches


def test_minibatches_are_random_shares_of_the_live_groups_the_same_each_time():
    live = np.array([True, True, False, True, True, True])
    updates = Updates.Config(minibatches=2).build(seed=3)
    parts = updates.parts(live, 0)
    np.testing.assert_array_equal(np.sum(parts, axis=0), live)
    assert sorted(part.sum() for part in parts) == [2, 3]
    again = Updates.Config(minibatches=2).build(seed=3)
    assert all(np.array_equal(x, y) for x, y in zip(parts, again.parts(live, 0), strict=True))
    drawn = {tuple(np.flatnonzero(updates.parts(live, version)[0])) for version in range(20)}
    assert len(drawn) > 5
    assert len(updates.parts(np.array([False, True]), 0)) == 1 and updates.parts(np.zeros(3, bool), 0) == []


@pytest.mark.numerics
@pytest.mark.parametrize("packed", [False, True])
def test_a_minibatch_has_the_mean_of_its_groups_and_the_advantages_of_the_batch(packed: bool):
    """Groups of 3, 5 and 7, against float64 loops over those of each mini-batch."""
    made, objective = ragged(failed=False), Objective.Config(aggregation=SequenceMean.Config()).build()
    packing = Packing.Config(lengths=(2 * MAX_NEW,)).build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    layout = PackedRows(packing) if packed else PaddedRows(MAX_PROMPT, MAX_NEW)
    headers = [header_of(one) for one in made]
    (whole,) = arrange(headers, objective, layout).minibatches
    chosen = [np.array([True, False, True]), np.array([False, True, False])]
    parts = arrange(headers, objective, layout, parts=lambda live: chosen).minibatches
    for groups, part in zip(chosen, parts, strict=True):
        expected = np.zeros(whole.prepared.arrays["weights"].shape)
        for g in np.flatnonzero(groups):
            for n, rollout in enumerate(made[g].rollouts):
                size = len(rollout.tokens)
                expected[g, n, :size] = 1 / (groups.sum() * len(made[g].rollouts) * size)
        np.testing.assert_allclose(part.prepared.arrays["weights"], expected, rtol=1e-6)
        np.testing.assert_allclose(part.prepared.arrays["metric_weights"], expected / expected.sum(), rtol=1e-6)
        np.testing.assert_array_equal(part.prepared.arrays["advantages"], whole.prepared.arrays["advantages"])
        placed = {(g, n) for one in part.microbatches for row in one.rows for g, rollouts in row for n in rollouts}
        assert placed == {(g, n) for g in np.flatnonzero(groups) for n in range(len(made[g].rollouts))}


# ---- updates


def by_hand(roles: Roles, groups: list[Group], coef: float, lr: float) -> tuple[Any, Any]:
    """Parameters after SGD by GRPO as its paper writes it; and if pi_old is forgotten: a mutation kept on purpose."""
    cfg = roles.trainer.cfg
    graphdef, _ = split(build_abstract(cfg.model))
    start = jax.tree.map(jnp.copy, roles.trainer.state["params"])

    def logprobs(params: Any, batch: Any) -> jax.Array:
        return policy_logprobs(bind(graphdef, params), batch, UpdateSpec(cfg.temperature)).logprobs

    def loss(params: Any, batch: Any, advantages: jax.Array, old: jax.Array, reference: jax.Array) -> jax.Array:
        new, mask = logprobs(params, batch), batch["action_mask"]
        ratio, a = jnp.exp(new - old), advantages[..., None]
        surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        penalty = jnp.exp(reference - new) - (reference - new) - 1
        of_rollouts = jnp.sum(jnp.where(mask, surrogate - coef * penalty, 0), -1) / jnp.sum(mask, -1)
        return -jnp.mean(jnp.mean(of_rollouts, axis=1))

    gradient, score = jax.jit(jax.grad(loss)), jax.jit(logprobs)

    def stepped(*, stale: bool) -> Any:
        params, parts = start, TWICE.build(seed=0).parts(np.ones(len(groups), bool), 0)
        for part in parts * TWICE.epochs:
            chosen = [groups[g] for g in np.flatnonzero(part)]
            rewards = np.array([[s.reward for s in group.scores] for group in chosen])
            advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
            batch = pack_groups(
                chosen,
                Objective.Config().build(),
                max_prompt_tokens=cfg.max_prompt_tokens,
                max_new_tokens=cfg.max_new_tokens,
            )[0]
            at_start = score(start, batch)
            slope = gradient(params, batch, advantages, at_start if stale else score(params, batch), at_start)
            params = jax.tree.map(lambda p, g: p - lr * g, params, slope)
        return params

    return stepped(stale=True), stepped(stale=False)


def furthest(one: Any, other: Any) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True))


@pytest.mark.slow
@pytest.mark.numerics
def test_updates_are_the_steps_made_by_hand(tmp_path: Path):
    """Two mini-batches, two epochs, clip to pi_old and KL to the reference, which both stay those of the start.

    At this rate ratios leave the clip (1.2; they reach 2.2) and `k3`, an exponential, stays small, so that other last
    bits of the parameters change the result by no more than 4e-5 of the movement.
    """
    cfg, lr = several(grpo(kl_coef=0.3), reference=FrozenCopy.Config()), 0.01
    cfg.learner = Learner.Config(optimizer=SGD.Config(momentum=0.0), schedule=Constant.Config(lr=lr), clip_norm=None)
    roles = Roles.make(tmp_path / "r", cfg, initial=tiny_params(cfg.policy))  # pyright: ignore
    groups = roles.submit(rewards=[1.0, 0.0, 0.0, 0.5], lengths=[4, 6, 2, 5])
    expected, forgetful = by_hand(roles, groups, 0.3, lr)
    before = jax.tree.map(np.asarray, roles.trainer.state["params"])
    assert roles.trainer.run_once()
    after = roles.trainer.state["params"]
    moved = furthest(after, before)
    assert within(furthest(after, expected), 3e-4 * moved)
    assert furthest(after, forgetful) > 0.3 * moved, "pi_old must not follow the policy within a batch"
    (row,) = roles.rows()
    assert row["updates"] == 4 and row["kl_old_new"] > 0 and row["kl_reference"] > 0 and 1.2 < row["ratio_max"] < 10
    assert int(roles.trainer.state["step"]) == roles.trainer.step == 1
    assert int(roles.trainer.state["opt_state"]["applied"]) == 4  # what the schedule counts


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "reference", [FrozenCopy.Config(reset_every=3), MovingAverage.Config(decay=0.9)], ids=["frozen", "average"]
)
def test_a_run_killed_within_a_batch_makes_the_same_updates(tmp_path: Path, reference: Any, packed: bool):
    """A batch is atomic: its updates are made again from the last checkpoint, to the bit, the reference's too."""

    def made() -> RLExperiment.Config:
        cfg = several(Objective.Config(regulariser=ReferenceKL.Config(coef=0.1)), reference=reference)
        if packed:
            cfg.trainer.set(packing=Packing.Config(lengths=(12, 6), rows=2))
        return cfg

    whole = Roles.make(tmp_path / "whole", made())
    whole.advance(STEPS)
    whole.trainer.close()
    killed = Roles.make(tmp_path / "r", made())
    killed.advance(2)
    sound, calls = killed.trainer._loop.step_fn.step, []  # pyright: ignore

    def dies(state: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sound(state, batch)

    killed.trainer._loop.step_fn.step = dies  # pyright: ignore
    with pytest.raises(KeyboardInterrupt):
        killed.advance(3)
    killed.crash()
    resumed = Roles.make(tmp_path / "r", made())
    assert resumed.trainer.step == 2
    resumed.advance(STEPS)
    resumed.trainer.close()
    assert host(resumed.trainer.state) == host(whole.trainer.state)
    assert resumed.rows() == whole.rows() and all(row["updates"] == 4 for row in whole.rows())


@pytest.mark.full
def test_updates_end_where_the_policy_has_moved_too_far(tmp_path: Path):
    roles = Roles.make(tmp_path / "r", several(grpo(), TWICE.clone(stop_kl=1e-9)))
    roles.submit(rewards=[1.0, 0.0, 0.0, 0.5], lengths=[4, 6, 2, 5])
    assert roles.trainer.run_once()
    (row,) = roles.rows()
    assert row["updates"] == 2  # before the first one nothing has moved; the second one sees it
