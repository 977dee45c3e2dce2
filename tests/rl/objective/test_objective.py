"""The joined form: filtering, the three policies, metrics; invariances of what no preset has (test_invariance.py)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import UserError
from rl.objective import (
    PRESETS,
    BatchAdvantage,
    ClippedSurrogate,
    EntropyBonus,
    LogProbability,
    MaxLengthMean,
    Objective,
    ReferenceKL,
    SequenceMean,
    SoftOverlongPenalty,
    Sum,
    TokenMean,
    TruncatedImportance,
    combine_metrics,
    derived_metrics,
)

pytestmark = pytest.mark.numerics

GROUPS, SAMPLES, LENGTH = 4, 3, 8
RICH = Objective.Config(
    importance=TruncatedImportance.Config(level="geometric", cap=1.3),
    surrogate=ClippedSurrogate.Config(low=0.2, high=0.28),
    regulariser=Sum.Config(terms=(ReferenceKL.Config(coef=0.1), EntropyBonus.Config(coef=0.01))),
    zero_variance="drop",
    truncated="mask",
)
VARIANTS = {
    "rich": RICH,
    "sequence": RICH.clone(
        aggregation=SequenceMean.Config(),
        surrogate=ClippedSurrogate.Config(low=0.05, high=0.05, level="sequence"),
    ),
}


def random_rollouts(seed: int = 0, groups: int = GROUPS) -> dict[str, np.ndarray]:
    """Ragged rollouts [groups, samples, T]; group 0 is constant; some truncated, one unscored."""
    rng = np.random.default_rng(seed)
    shape = (groups, SAMPLES, LENGTH)
    lengths = rng.integers(1, LENGTH + 1, size=shape[:-1])
    mask = np.arange(LENGTH) < lengths[..., None]
    rewards = rng.integers(0, 3, size=shape[:-1]) / 2.0
    rewards[0], rewards[1] = 1.0, [0.0, 1.0, 0.5]
    scored = np.ones(shape[:-1], bool)
    scored[1, 2] = False
    old = rng.normal(-1.5, 0.3, shape)
    return {
        "rewards": rewards,
        "action_mask": mask,
        "truncated": rng.random(shape[:-1]) < 0.2,
        "scored": scored,
        "new": old + rng.normal(0, 0.3, shape),
        "logprobs_old": old,
        "logprobs_behaviour": old + rng.normal(0, 0.2, shape),
        "logprobs_reference": old + rng.normal(0, 0.5, shape),
        "entropy": rng.uniform(0.5, 2.0, shape),
    }


PER_TOKEN = ("logprobs_old", "logprobs_behaviour", "logprobs_reference", "action_mask")


def make_batch(objective: Objective, data, groups=None):
    prepared = objective.prepare(
        data["rewards"],
        data["action_mask"],
        groups=groups,
        truncated=data["truncated"],
        scored=data["scored"],
    )
    arrays = {**{name: data[name] for name in PER_TOKEN}, **prepared.arrays}
    return {k: jnp.asarray(v) for k, v in arrays.items()}, prepared.stats


@functools.cache
def jitted(objective: Objective):
    return jax.jit(jax.value_and_grad(objective.loss, has_aux=True))


@functools.cache
def variant(name: str) -> Objective:
    return VARIANTS[name].build()


def evaluate(objective: Objective, new, batch, entropy):
    """Loss, gradient with respect to log pi, metrics."""
    (loss, metrics), gradient = jitted(objective)(
        jnp.asarray(new, jnp.float32), batch, jnp.asarray(entropy, jnp.float32)
    )
    return float(loss), np.asarray(gradient), metrics


def run(objective: Objective, data, groups=None):
    batch, _ = make_batch(objective, data, groups)
    return evaluate(objective, data["new"], batch, data["entropy"])


def assert_same(metrics, expected):
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


# ---- invariances ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(GROUPS * SAMPLES)))
def test_any_micro_batching_gives_the_same(name, seed, order):
    """Rows are dealt to unequal parts, across group borders; parts add up to the whole."""
    objective = variant(name)
    rollouts = random_rollouts(seed)
    batch, _ = make_batch(objective, rollouts)
    loss, gradient, metrics = evaluate(objective, rollouts["new"], batch, rollouts["entropy"])

    rows = GROUPS * SAMPLES
    flat = {k: v.reshape(rows, *v.shape[2:]) for k, v in batch.items()}
    new, entropy = (rollouts[k].reshape(rows, LENGTH) for k in ("new", "entropy"))
    total, total_metrics, pieces = 0.0, None, np.zeros((rows, LENGTH))
    for chosen in np.split(np.array(order), [1, 5]):  # parts of 1, 4 and 7 rows
        micro = {k: v[chosen] for k, v in flat.items()}
        piece, pieces[chosen], m = evaluate(objective, new[chosen], micro, entropy[chosen])
        total += piece
        total_metrics = m if total_metrics is None else combine_metrics(total_metrics, m)
    assert total == pytest.approx(loss, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(pieces.reshape(gradient.shape), gradient, rtol=1e-5, atol=1e-8)
    assert_same(total_metrics, metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_padding_changes_nothing_whatever_it_holds(name):
    """Longer rows and unscored rollouts full of NaN: same loss, gradient, metrics."""
    objective = variant(name)
    rollouts = random_rollouts(1)
    loss, gradient, metrics = run(objective, rollouts)

    def pad(key, value):
        fill = {"action_mask": False, "truncated": False, "scored": False}.get(key, np.nan)
        widths = [(0, 0), (0, 2)] + [(0, 5)] * (value.ndim - 2)
        return np.pad(value, widths, constant_values=fill)

    padded = {k: pad(k, v) for k, v in rollouts.items()}
    padded["action_mask"][:, SAMPLES:, :3] = True  # tokens of a rollout whose score was lost
    got_loss, got_gradient, got_metrics = run(objective, padded)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(got_gradient[:, :SAMPLES, :LENGTH], gradient, rtol=1e-5, atol=1e-8)
    assert not got_gradient[:, SAMPLES:].any() and not got_gradient[..., LENGTH:].any()
    assert_same(got_metrics, metrics)


@pytest.mark.slow
def test_nan_outside_the_mask_is_selected_away_not_multiplied():
    """Run without jit: XLA may rewrite mask * x to a selection, which would hide the mistake."""
    objective = VARIANTS["rich"].build()
    rollouts = random_rollouts(1)
    batch, _ = make_batch(objective, rollouts)
    holes = np.where(rollouts["action_mask"], rollouts["new"], np.nan)
    loss, gradient = jax.value_and_grad(lambda x: objective.loss(x, batch, -x)[0])(jnp.asarray(holes, jnp.float32))
    assert np.isfinite(loss) and np.isfinite(gradient).all() and gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_order_changes_nothing(name):
    """Rollouts as one shuffled list with group ids instead of [groups, samples]."""
    objective = variant(name)
    rollouts = random_rollouts(2)
    loss, gradient, metrics = run(objective, rollouts)
    rows = GROUPS * SAMPLES
    order = np.random.default_rng(0).permutation(rows)
    shuffled = {k: v.reshape(rows, *v.shape[2:])[order] for k, v in rollouts.items()}
    ids = (np.repeat(np.arange(GROUPS), SAMPLES) * 17 + 1000)[order]
    got_loss, got_gradient, got_metrics = run(objective, shuffled, groups=ids)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(got_gradient, gradient.reshape(rows, LENGTH)[order], rtol=1e-5, atol=1e-8)
    assert_same(got_metrics, metrics)


# ---- who takes part ------------------------------------------------------------------------


def tokens_weight(cfg: Objective.Config, rewards, lengths, **flags):
    """(advantages, weight of every rollout's first token, stats)."""
    lengths = np.asarray(lengths)
    mask = np.arange(lengths.max()) < lengths[..., None]
    given: Any = {name: np.asarray(flag) for name, flag in flags.items()}
    prepared = cfg.build().prepare(np.asarray(rewards, float), mask, **given)
    arrays = prepared.arrays
    return arrays["advantages"], arrays["weights"][..., 0], prepared.stats


def test_zero_variance_groups_leave_the_denominator_when_dropped():
    rewards, lengths = [[1, 1], [0, 1]], [[3, 3], [2, 2]]
    _, kept, stats = tokens_weight(Objective.Config(), rewards, lengths)
    np.testing.assert_allclose(kept, 1 / 10)
    _, dropped, _ = tokens_weight(Objective.Config(zero_variance="drop"), rewards, lengths)
    np.testing.assert_allclose(dropped, [[0, 0], [1 / 4, 1 / 4]])
    assert stats["zero_variance_fraction"] == 0.5


def test_dropping_equals_never_having_had_the_group():
    objective = RICH.build()
    rollouts = random_rollouts(4)
    loss, gradient, _ = run(objective, rollouts)
    without, gradient_without, _ = run(objective, {k: v[1:] for k, v in rollouts.items()})
    assert loss == pytest.approx(without, rel=1e-6)
    np.testing.assert_allclose(gradient[1:], gradient_without, rtol=1e-6)
    assert not gradient[0].any()


def test_truncated_rollouts_leave_loss_and_denominator_but_not_the_baseline():
    flags = {"truncated": [[True, False, False]]}
    rewards, lengths = [[0.0, 0.0, 1.0]], [[4, 2, 3]]
    base, kept, stats = tokens_weight(Objective.Config(), rewards, lengths, **flags)
    np.testing.assert_allclose(kept, 1 / 9)
    masked = Objective.Config(truncated="mask")
    advantages, weights, _ = tokens_weight(masked, rewards, lengths, **flags)
    np.testing.assert_allclose(weights, [[0, 1 / 5, 1 / 5]])
    np.testing.assert_allclose(advantages, [[0, base[0, 1], base[0, 2]]])
    assert stats["truncation_fraction"] == pytest.approx(1 / 3)


def test_unscored_rollouts_leave_everything():
    rewards, lengths = [[0.0, 1.0, 9.0], [0.0, 1.0, 0.0]], [[2, 2, 5], [1, 1, 1]]
    scored = [[True, True, False], [True, False, False]]
    cfg = Objective.Config()
    advantages, weights, stats = tokens_weight(cfg, rewards, lengths, scored=scored)
    np.testing.assert_allclose(advantages, [[-1, 1, 0], [0, 0, 0]], atol=1e-5)
    # The second group has one survivor: nothing to compare with, dropped whole.
    np.testing.assert_allclose(weights, [[1 / 4, 1 / 4, 0], [0, 0, 0]])
    assert stats["live_rollouts"] == 2 and stats["live_tokens"] == 4
    assert stats["unscored_fraction"] == pytest.approx(0.5)


def test_a_nan_reward_is_an_error_unless_unscored():
    rewards, lengths = [[np.nan, 1.0, 0.0]], [[1, 1, 1]]
    with pytest.raises(ValueError, match="reward that is not finite"):
        tokens_weight(Objective.Config(), rewards, lengths)
    advantages, _, _ = tokens_weight(Objective.Config(), rewards, lengths, scored=[[False, True, True]])
    np.testing.assert_allclose(advantages, [[0, 1, -1]], atol=1e-5)


def test_shaping_comes_before_normalisation_and_after_the_variance_filter():
    shaping = SoftOverlongPenalty.Config(max_length=8, buffer=4)
    rewards, lengths = [[1, 1], [0, 1]], [[2, 8], [2, 2]]
    cfg = Objective.Config(reward_shaping=shaping)
    advantages, _, _ = tokens_weight(cfg, rewards, lengths)
    np.testing.assert_allclose(advantages, [[1, -1], [-1, 1]], atol=1e-5)
    advantages, weights, stats = tokens_weight(cfg.clone(zero_variance="drop"), rewards, lengths)
    np.testing.assert_allclose(advantages, [[0, 0], [-1, 1]], atol=1e-5)
    assert not weights[0].any() and stats["zero_variance_fraction"] == 0.5


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_left_is_zero_not_nan(name):
    objective = variant(name)
    rollouts = random_rollouts(0)
    rollouts["scored"][:] = False
    loss, gradient, metrics = run(objective, rollouts)
    assert loss == 0.0 and not gradient.any()
    assert all(float(v) == 0.0 for v in metrics.values())
    _, stats = make_batch(objective, rollouts)
    assert all(np.isfinite(v) for v in stats.values())


# ---- the three policies --------------------------------------------------------------------


@pytest.mark.slow
def test_at_ratio_one_grpo_is_reinforce_with_the_advantage():
    rollouts = random_rollouts(5)
    rollouts["new"] = rollouts["logprobs_old"]
    grpo = Objective.Config(surrogate=ClippedSurrogate.Config()).build()
    reinforce = Objective.Config(surrogate=LogProbability.Config()).build()
    loss, gradient, metrics = run(grpo, rollouts)
    _, expected, _ = run(reinforce, rollouts)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    batch, _ = make_batch(grpo, rollouts)
    by_hand = -np.asarray(batch["weights"] * batch["advantages"][..., None])
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-6)
    assert float(metrics["ratio_mean"]) == pytest.approx(1.0, rel=1e-5)
    assert float(metrics["clip_fraction"]) == 0.0
    # Group advantages sum to zero, so per-sequence means make the loss 0 by construction.
    rollouts["truncated"][:] = False
    loss, _, _ = run(PRESETS["grpo"]().build(), rollouts)
    assert loss == pytest.approx(0.0, abs=1e-6)


def test_current_equals_recompute_at_the_start_and_needs_no_old():
    rollouts = random_rollouts(6)
    rollouts["new"] = rollouts["logprobs_old"]
    recompute, current = RICH.build(), RICH.clone(old_policy="current").build()
    assert recompute.needs_old and not current.needs_old
    batch, _ = make_batch(current, rollouts)
    expected = evaluate(recompute, rollouts["new"], batch, rollouts["entropy"])
    del batch["logprobs_old"]
    got = evaluate(current, rollouts["new"], batch, rollouts["entropy"])
    assert got[0] == pytest.approx(expected[0])
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)
    assert_same(got[2], expected[2])
    # After a step it would be wrong: the ratio is one whatever happened.
    moved, _ = make_batch(current, random_rollouts(6))
    _, _, metrics = evaluate(current, random_rollouts(6)["new"], moved, rollouts["entropy"])
    assert float(metrics["ratio_max"]) == 1.0


@pytest.mark.slow
def test_behaviour_is_recompute_with_mu_as_the_old_policy():
    rollouts = random_rollouts(7)
    cfg = Objective.Config(zero_variance="drop")
    bypass = run(cfg.clone(old_policy="behaviour").build(), rollouts)
    rollouts["logprobs_old"] = rollouts["logprobs_behaviour"]
    expected = run(cfg.build(), rollouts)
    assert bypass[0] == pytest.approx(expected[0])
    np.testing.assert_allclose(bypass[1], expected[1])
    # The mismatch with the sampler must stay visible though pi_old is defined as mu.
    assert float(bypass[2]["drift_mean"]) > 0.05
    with pytest.raises(UserError, match="Objective.old_policy: .*TruncatedImportance.* got 'behaviour'"):
        RICH.clone(old_policy="behaviour").build()


def test_clip_acts_on_pi_over_old_and_importance_on_old_over_mu():
    """Mu far off and pi = pi_old: nothing is clipped, every weight is capped."""
    rollouts = random_rollouts(8)
    rollouts["new"] = rollouts["logprobs_old"]
    rollouts["logprobs_behaviour"] = rollouts["logprobs_old"] - 3.0
    cfg = Objective.Config(importance=TruncatedImportance.Config(cap=2.0))
    _, gradient, metrics = run(cfg.build(), rollouts)
    _, plain, _ = run(Objective.Config().build(), rollouts)
    np.testing.assert_allclose(gradient, 2.0 * plain, rtol=1e-6)
    assert float(metrics["clip_fraction"]) == 0.0
    assert float(metrics["importance_limited_fraction"]) == pytest.approx(1.0, rel=1e-5)
    assert float(metrics["importance_mean"]) == pytest.approx(2.0, rel=1e-5)


@pytest.mark.slow
def test_importance_multiplies_the_regulariser_too():
    rollouts = random_rollouts(9)
    rollouts["logprobs_behaviour"] = rollouts["logprobs_old"] - 3.0
    kl = Objective.Config(regulariser=ReferenceKL.Config(coef=1.0), advantage=BatchAdvantage.Config())
    rollouts["rewards"][:] = 1.0  # no advantage left: only the regulariser speaks
    loss, _, _ = run(kl.build(), rollouts)
    capped, _, _ = run(kl.clone(importance=TruncatedImportance.Config(cap=1.5)).build(), rollouts)
    assert loss > 0 and capped == pytest.approx(1.5 * loss, rel=1e-5)


def test_advantages_may_be_given_per_token():
    rollouts = random_rollouts(10)
    objective = PRESETS["ppo_clip"]().build()
    batch, _ = make_batch(objective, rollouts)
    per_rollout = evaluate(objective, rollouts["new"], batch, rollouts["entropy"])
    per_token = jnp.broadcast_to(batch["advantages"][..., None], rollouts["new"].shape)
    critic = {**batch, "advantages": per_token}
    got = evaluate(objective, rollouts["new"], critic, rollouts["entropy"])
    np.testing.assert_allclose(got[1], per_rollout[1])


# ---- metrics and errors --------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", [TokenMean.Config(), MaxLengthMean.Config(max_length=20)])
def test_metrics_are_weighted_means_over_the_tokens_of_the_loss(aggregation):
    rollouts = random_rollouts(11)
    objective = RICH.clone(aggregation=aggregation).build()
    batch, stats = make_batch(objective, rollouts)
    loss, _, metrics = evaluate(objective, rollouts["new"], batch, rollouts["entropy"])
    live = np.asarray(batch["weights"]) > 0
    assert 0 < live.sum() == stats["live_tokens"] < rollouts["action_mask"].sum()
    old, new = rollouts["logprobs_old"][live], rollouts["new"][live]
    mismatch = np.abs(old - rollouts["logprobs_behaviour"][live])
    reference = rollouts["logprobs_reference"][live] - new
    log_mu = new - rollouts["logprobs_behaviour"][live]
    advantages = np.broadcast_to(np.asarray(batch["advantages"])[..., None], live.shape)[live]
    mean = functools.partial(np.average, weights=np.asarray(batch["weights"])[live])
    expected = {
        "loss": loss,
        "ratio_mean": mean(np.exp(new - old)),
        "ratio_max": np.exp(new - old).max(),
        "kl_old_new": mean(np.exp(new - old) - 1 - (new - old)),
        "kl_mu_pi": mean(np.exp(log_mu) - 1 - log_mu),
        "ratio_mu_mean": mean(np.exp(log_mu)),
        "ratio_mu_square": mean(np.exp(2 * log_mu)),
        "kl_reference": mean(np.exp(reference) - 1 - reference),
        "drift_mean": mean(mismatch),
        "drift_max": mismatch.max(),
        "advantage_mean": mean(advantages),
        "advantage_abs_mean": mean(np.abs(advantages)),
        "entropy": mean(rollouts["entropy"][live]),
        "clip_fraction": mean(
            ((advantages > 0) & (np.exp(new - old) > 1.28)) | ((advantages < 0) & (np.exp(new - old) < 0.8))
        ),
    }
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4), name
    assert metrics.keys() - expected.keys() == {"importance_mean", "importance_limited_fraction"}


def test_effective_sample_size_is_one_for_equal_ratios_and_falls_to_one_token():
    def ess(log_ratio: list[float]) -> float:
        batch: Any = {
            "action_mask": jnp.ones((1, 4), bool),
            "weights": jnp.full((1, 4), 0.25),
            "logprobs_behaviour": jnp.asarray([log_ratio]) * -1.0,
            "advantages": jnp.ones(1),
        }
        objective = Objective.Config(old_policy="current").build()
        return derived_metrics(objective.loss(jnp.zeros((1, 4)), batch)[1])["ess"]

    assert ess([0.3] * 4) == pytest.approx(1.0)
    assert ess([0.0, 0.0, 0.0, 15.0]) == pytest.approx(1 / 4, rel=1e-4)
    assert ess([0.0, np.log(2.0), 0.0, np.log(2.0)]) == pytest.approx(6**2 / (4 * 10))
    assert derived_metrics({"ratio_mu_mean": 0.0, "ratio_mu_square": 0.0}) == {} == derived_metrics({"loss": 0.0})


def test_metrics_carry_no_gradient():
    rollouts = random_rollouts(12)
    objective = RICH.build()
    batch, _ = make_batch(objective, rollouts)

    def metric_sum(x):
        entropy = jnp.asarray(rollouts["entropy"], jnp.float32)
        return sum(objective.loss(x, batch, entropy)[1].values())

    assert not np.any(jax.grad(metric_sum)(jnp.asarray(rollouts["new"], jnp.float32)))


def test_everything_is_float32_whatever_comes_in():
    rollouts = random_rollouts(13)
    objective = RICH.build()
    batch, _ = make_batch(objective, rollouts)
    half = {k: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v for k, v in batch.items()}
    loss, metrics = objective.loss(jnp.asarray(rollouts["new"], jnp.bfloat16), half, jnp.asarray(rollouts["entropy"]))
    assert {loss.dtype, *(m.dtype for m in metrics.values())} == {jnp.dtype("float32")}


def test_missing_and_misshapen_inputs_are_named():
    rollouts = random_rollouts(14)
    objective = Objective.Config().build()
    batch, _ = make_batch(objective, rollouts)
    new = jnp.asarray(rollouts["new"])
    without = {k: v for k, v in batch.items() if k != "logprobs_old"}
    with pytest.raises(KeyError, match="'logprobs_old'.*is missing.*old_policy='recompute'"):
        objective.loss(new, without)
    with pytest.raises(ValueError, match=r"batch\['weights'\] has shape \(4, 3\), expected"):
        objective.loss(new, {**batch, "weights": batch["weights"][..., 0]})
    with pytest.raises(ValueError, match=r"batch\['advantages'\] has shape \(4, 2\), expected"):
        objective.loss(new, {**batch, "advantages": batch["advantages"][:, :2]})
    with pytest.raises(ValueError, match="entropy has shape"):
        objective.loss(new, batch, new[..., 0])
    with pytest.raises(ValueError, match="groups is needed"):
        objective.prepare(np.zeros(3), np.ones((3, 2), bool))
    with pytest.raises(ValueError, match="truncated has shape"):
        objective.prepare(np.zeros((1, 3)), np.ones((1, 3, 2), bool), truncated=np.zeros(3, bool))
    with pytest.raises(ValueError, match="action_mask has shape"):
        objective.prepare(np.zeros((1, 3)), np.ones((1, 2, 2), bool))
    with pytest.raises(ValueError, match="metrics differ"):
        combine_metrics({"loss": new}, {})


def test_dropping_zero_variance_needs_a_group_relative_advantage():
    cfg = Objective.Config(advantage=BatchAdvantage.Config(), zero_variance="drop")
    with pytest.raises(UserError, match="Objective.zero_variance: .*BatchAdvantage.* got 'drop'"):
        cfg.build()
