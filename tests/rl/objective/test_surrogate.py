"""Surrogates: value in the min/clip form of the papers, gradient by analysis or differences."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh.errors import UserError
from rl.objective import ClippedSurrogate, ClippedWeightLogProbability, LogProbability, Ratio, SoftGate
from rl.objective.tokens import gather_tokens

pytestmark = pytest.mark.numerics

SHAPE = (2, 4, 6)


def random_inputs(seed: int = 0):
    """Log-probabilities spread widely enough that every branch of a clip is taken."""
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < 0.8
    mask[..., 0] = True
    batch = {
        "logprobs_old": rng.normal(-1.5, 0.3, SHAPE),
        "logprobs_behaviour": np.zeros(SHAPE),
        "action_mask": mask,
        "weights": mask * 1.0,
        "advantages": rng.normal(size=SHAPE[:-1]),
    }
    return batch["logprobs_old"] + rng.normal(0.0, 0.5, SHAPE), batch


def total(cfg, new, batch):
    """Sum over tokens of sg[A] * surrogate, as a function of log pi."""
    arrays = {k: jnp.asarray(v) for k, v in batch.items()}
    surrogate = cfg.build()

    def objective(x):
        tokens = gather_tokens(x, arrays, old_policy="recompute")
        return jnp.sum(tokens.weights * tokens.advantages * surrogate(tokens)[0])

    return jax.value_and_grad(objective)(jnp.asarray(new, jnp.float32))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, 1.0 - low), 1.0 + high)


def token_loops(new, batch, value, slope):
    """Sum of value(r, A, log pi) and its gradient slope(r, A, log pi) by token."""
    result, gradient = 0.0, np.zeros(SHAPE)
    for index in np.ndindex(SHAPE):
        if batch["action_mask"][index]:
            ratio = math.exp(new[index] - batch["logprobs_old"][index])
            a = batch["advantages"][index[:-1]]
            result += value(ratio, a, new[index])
            gradient[index] = slope(ratio, a, new[index])
    return result, gradient


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, 0.0), (0.2, 0.28, 1.5)])
def test_token_clip_is_that_of_ppo(low, high, dual):
    new, batch = random_inputs()

    def value(r, a, _):
        inner = min(r * a, clip(r, low, high) * a)
        return max(inner, dual * a) if dual and a < 0 else inner

    def slope(r, a, x):
        constant = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        constant |= bool(dual) and a < 0 and r > dual
        return 0.0 if constant else a * r

    cfg = ClippedSurrogate.Config(low=low, high=high, dual=dual)
    expected, expected_gradient = token_loops(new, batch, value, slope)
    got, gradient = total(cfg, new, batch)
    assert float(got) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert ((expected_gradient == 0) & batch["action_mask"]).sum() > 3


@pytest.mark.slow
def test_clipped_flag_marks_exactly_the_tokens_without_gradient():
    new, batch = random_inputs()
    cfg = ClippedSurrogate.Config(low=0.2, high=0.28, dual=1.5)
    tokens = gather_tokens(jnp.asarray(new), {k: jnp.asarray(v) for k, v in batch.items()}, old_policy="recompute")
    _, clipped = cfg.build()(tokens)
    _, gradient = total(cfg, new, batch)
    np.testing.assert_array_equal(clipped, (np.asarray(gradient) == 0) & batch["action_mask"])


def sequence_objective(new, batch, low, high):
    """sum_i |o_i| * min(s_i A_i, clip(s_i) A_i), s_i the geometric mean ratio (GSPO)."""
    result = 0.0
    for row in np.ndindex(SHAPE[:-1]):
        steps = np.flatnonzero(batch["action_mask"][row])
        difference = new[row][steps] - batch["logprobs_old"][row][steps]
        s, a = math.exp(difference.mean()), batch["advantages"][row]
        result += len(steps) * min(s * a, clip(s, low, high) * a)
    return result


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.15), (10.0, 1e6)])
def test_sequence_clip_is_that_of_gspo(low, high):
    """The stop-gradient form has the value of the sequence ratio and its true gradient."""
    new, batch = random_inputs()
    got, gradient = total(ClippedSurrogate.Config(low=low, high=high, level="sequence"), new, batch)
    assert float(got) == pytest.approx(sequence_objective(new, batch, low, high), rel=1e-5)
    step = 1e-5
    for index in np.ndindex(SHAPE):
        up, down = new.copy(), new.copy()
        up[index] += step
        down[index] -= step
        slope = sequence_objective(up, batch, low, high) - sequence_objective(down, batch, low, high)
        assert float(gradient[index]) == pytest.approx(slope / (2 * step), rel=1e-4, abs=1e-5)


def test_unclipped_ratio_is_a_clip_that_never_binds():
    new, batch = random_inputs()
    got, gradient = total(Ratio.Config(), new, batch)
    expected, expected_gradient = token_loops(new, batch, lambda r, a, x: r * a, lambda r, a, x: r * a)
    assert float(got) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    _, wide = total(ClippedSurrogate.Config(low=1.0, high=1e6), new, batch)
    np.testing.assert_array_equal(gradient, wide)


def test_log_probability_is_reinforce():
    new, batch = random_inputs()
    got, gradient = total(LogProbability.Config(), new, batch)
    expected, expected_gradient = token_loops(new, batch, lambda r, a, x: a * x, lambda r, a, x: a)
    assert float(got) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.28), (0.2, 0.2)])
def test_clipped_weight_is_cispo(low, high):
    """The weight is a constant of the gradient, so clipped tokens still move."""
    new, batch = random_inputs()
    expected, expected_gradient = token_loops(
        new,
        batch,
        lambda r, a, x: clip(r, low, high) * a * x,
        lambda r, a, x: clip(r, low, high) * a,
    )
    got, gradient = total(ClippedWeightLogProbability.Config(low=low, high=high), new, batch)
    assert float(got) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5)
    assert np.all(np.asarray(gradient)[batch["action_mask"]] != 0)


def test_absurd_ratios_stay_finite():
    new, batch = random_inputs()
    batch["logprobs_old"] = batch["logprobs_old"] - 300.0
    for cfg in (Ratio.Config(), ClippedSurrogate.Config(), ClippedWeightLogProbability.Config()):
        value, gradient = total(cfg, new, batch)
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_limits_are_checked():
    with pytest.raises(UserError, match="low: expected 0 or more, got -0.1"):
        ClippedSurrogate.Config(low=-0.1).build()
    with pytest.raises(UserError, match=r"dual: expected 0, or above 1 \+ high=1.2, got 1.1"):
        ClippedSurrogate.Config(dual=1.1).build()


def test_the_soft_gate_equals_loops_and_says_where_it_takes_half_of_the_slope():
    new, batch = random_inputs(1)
    cfg = SoftGate.Config(tau_pos=2.0, tau_neg=5.0)

    def gate(r: float, a: float) -> float:
        return 1 / (1 + math.exp(-(2.0 if a > 0 else 5.0) * (r - 1)))

    value, gradient = total(cfg, new, batch)
    wanted, slopes = token_loops(
        new,
        batch,
        lambda r, a, x: 4 / (2.0 if a > 0 else 5.0) * gate(r, a) * a,
        lambda r, a, x: 4 * gate(r, a) * (1 - gate(r, a)) * r * a,
    )
    assert float(value) == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-5)  # 1 - sigmoid in float32
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    limited = np.asarray(cfg.build()(gather_tokens(jnp.asarray(new), arrays, old_policy="recompute"))[1])
    for at in np.argwhere(batch["action_mask"]):
        p = gate(math.exp(new[*at] - batch["logprobs_old"][*at]), batch["advantages"][*at[:-1]])
        assert limited[*at] == (4 * p * (1 - p) < 0.5)
    assert limited.any() and not limited[~batch["action_mask"]].any()
    with pytest.raises(UserError, match="tau_neg: expected a number above 0, got 0"):
        SoftGate.Config(tau_neg=0.0).build()
