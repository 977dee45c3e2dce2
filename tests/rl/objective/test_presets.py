"""Every preset against the formula of its paper, written out with loops in float64.

`paper(new, at)` is the objective J at log-probabilities `new`; `at` is the point of
differentiation, used wherever the paper stops a gradient. Its gradient is taken by central
differences. Groups of unequal reward, ragged lengths, ratios on both sides of every clip.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh.errors import UserError
from rl.objective import PRESETS, NoRegulariser, Objective, SoftOverlongPenalty
from rl.objective.presets import distillation

GROUPS, SAMPLES, LENGTH = 3, 4, 5
RNG = np.random.default_rng(7)
LENGTHS = RNG.integers(1, LENGTH + 1, size=(GROUPS, SAMPLES))
REWARDS = np.array([[0, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]], float)  # the last has no spread
OLD = RNG.normal(-1.5, 0.3, (GROUPS, SAMPLES, LENGTH))
MU = OLD + RNG.normal(0, 0.1, OLD.shape)
REFERENCE = OLD + RNG.normal(0, 0.3, OLD.shape)
NEW = OLD + RNG.normal(0, 0.35, OLD.shape)

ROLLOUTS = [(g, i) for g in range(GROUPS) for i in range(SAMPLES)]
Paper = Callable[[np.ndarray, np.ndarray], float]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, 1 - low), 1 + high)


def ppo(r: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(r * a, clip(r, low, high) * a)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def std(values) -> float:
    values = list(values)
    return math.sqrt(mean((v - mean(values)) ** 2 for v in values))


def steps(g: int, i: int) -> range:
    return range(LENGTHS[g, i])


def grpo_advantage(g: int, i: int) -> float:
    spread = std(REWARDS[g])
    return (REWARDS[g, i] - mean(REWARDS[g])) / (spread + 1e-6)


def ratio(new: np.ndarray, g: int, i: int, t: int) -> float:
    return math.exp(new[g, i, t] - OLD[g, i, t])


def grpo(new, at, kl_coef=0.0):
    def token(g, i, t):
        d = REFERENCE[g, i, t] - new[g, i, t]
        kl = math.exp(d) - d - 1
        return ppo(ratio(new, g, i, t), grpo_advantage(g, i)) - kl_coef * kl

    return mean(mean(mean(token(g, i, t) for t in steps(g, i)) for i in range(SAMPLES)) for g in range(GROUPS))


def grpo_kl(new, at):
    return grpo(new, at, kl_coef=0.04)


def dr_grpo(new, at):
    return mean(
        sum(ppo(ratio(new, g, i, t), REWARDS[g, i] - mean(REWARDS[g])) for t in steps(g, i)) / 16 for g, i in ROLLOUTS
    )


def dapo(new, at):
    live = [(g, i) for g, i in ROLLOUTS if 0 < REWARDS[g].sum() < SAMPLES]
    return mean(ppo(ratio(new, g, i, t), grpo_advantage(g, i), 0.2, 0.28) for g, i in live for t in steps(g, i))


def gspo(new, at):
    def sequence(g, i):
        s = math.exp(mean(new[g, i, t] - OLD[g, i, t] for t in steps(g, i)))
        return ppo(s, grpo_advantage(g, i), 3e-4, 4e-4)

    return mean(sequence(g, i) for g, i in ROLLOUTS)


def cispo(new, at):
    tokens = [(g, i, t) for g, i in ROLLOUTS for t in steps(g, i)]
    return mean(min(ratio(at, g, i, t), 1.28) * grpo_advantage(g, i) * new[g, i, t] for g, i, t in tokens)


def scale_rl(new, at):
    live = [g for g in range(GROUPS) if 0 < REWARDS[g].sum() < SAMPLES]
    centred = {(g, i): REWARDS[g, i] - mean(REWARDS[g]) for g in live for i in range(SAMPLES)}
    spread = std(centred.values())

    def token(g, i, t):
        weight = min(math.exp(at[g, i, t] - MU[g, i, t]), 1.5)
        return weight * centred[g, i] / spread * new[g, i, t]

    return mean(mean(token(g, i, t) for i in range(SAMPLES) for t in steps(g, i)) for g in live)


def sequence_logprob(new, g, i):
    return sum(new[g, i, t] for t in steps(g, i))


def rloo(new, at):
    def baseline(g, i):
        return mean(REWARDS[g, j] for j in range(SAMPLES) if j != i)

    return mean((REWARDS[g, i] - baseline(g, i)) * sequence_logprob(new, g, i) for g, i in ROLLOUTS)


def reinforce(new, at):
    return mean((REWARDS[g, i] - 0.5) * sequence_logprob(new, g, i) for g, i in ROLLOUTS)


def reinforce_pp(new, at):
    tokens = [(g, i, t) for g, i in ROLLOUTS for t in steps(g, i)]
    centre, spread = mean(REWARDS.ravel()), std(REWARDS.ravel())
    return mean(ppo(ratio(new, g, i, t), (REWARDS[g, i] - centre) / spread) for g, i, t in tokens)


def reinforce_pp_baseline(new, at):
    tokens = [(g, i, t) for g, i in ROLLOUTS for t in steps(g, i)]
    centred = {(g, i): REWARDS[g, i] - mean(REWARDS[g]) for g, i in ROLLOUTS}
    spread = std(centred.values())

    def token(g, i, t):
        kl = 0.5 * (new[g, i, t] - REFERENCE[g, i, t]) ** 2
        return ppo(ratio(new, g, i, t), centred[g, i] / spread) - 0.01 * kl

    return mean(token(*token_id) for token_id in tokens)


def maxrl(new, at):
    """Algorithm 1: sum_j (r_j - r) score_j / (N r) per prompt, nothing where r = 0."""
    return mean(
        sum((REWARDS[g, i] - mean(REWARDS[g])) * sequence_logprob(new, g, i) for i in range(SAMPLES))
        / (SAMPLES * mean(REWARDS[g]))
        for g in range(GROUPS)
    )


CASES: dict[str, tuple[Objective.Config, Paper]] = {
    "grpo": (PRESETS["grpo"](), grpo),
    "grpo with KL": (PRESETS["grpo"](kl_coef=0.04), grpo_kl),
    "dr_grpo": (PRESETS["dr_grpo"](max_length=16), dr_grpo),
    "dapo": (PRESETS["dapo"](), dapo),
    "gspo": (PRESETS["gspo"](), gspo),
    "cispo": (PRESETS["cispo"](), cispo),
    "scale_rl": (PRESETS["scale_rl"](cap=1.5), scale_rl),
    "rloo": (PRESETS["rloo"](), rloo),
    "reinforce": (PRESETS["reinforce"](baseline=0.5), reinforce),
    "reinforce_pp": (PRESETS["reinforce_pp"](), reinforce_pp),
    "reinforce_pp with baseline": (
        PRESETS["reinforce_pp"](group_baseline=True, kl_coef=0.01),
        reinforce_pp_baseline,
    ),
    "ppo_clip": (PRESETS["ppo_clip"](), reinforce_pp),
    "maxrl": (PRESETS["maxrl"](), maxrl),
}


def value_and_gradient(cfg: Objective.Config) -> tuple[float, np.ndarray]:
    """J and dJ / d log pi by the implementation."""
    objective = cfg.build()
    mask = np.arange(LENGTH) < LENGTHS[..., None]
    batch = {
        "action_mask": mask,
        "logprobs_old": OLD,
        "logprobs_behaviour": MU,
        "logprobs_reference": REFERENCE,
        **objective.prepare(REWARDS, mask).arrays,
    }
    arrays = {k: jnp.asarray(v) for k, v in batch.items()}
    (loss, _), gradient = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(
        jnp.asarray(NEW, jnp.float32), arrays
    )
    return -float(loss), -np.asarray(gradient)


def differences(paper: Paper, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros(NEW.shape)
    for index in np.ndindex(NEW.shape):
        up, down = NEW.copy(), NEW.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (paper(up, NEW) - paper(down, NEW)) / (2 * step)
    return gradient


@pytest.mark.parametrize("name", CASES)
def test_is_the_paper_formula(name):
    cfg, paper = CASES[name]
    value, gradient = value_and_gradient(cfg)
    assert value == pytest.approx(paper(NEW, NEW), rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(gradient, differences(paper), rtol=1e-4, atol=1e-7)
    assert np.count_nonzero(gradient) >= 3


def test_distillation_is_the_divergence_from_the_teacher_and_no_reward_counts():
    """The gradient is that of sum_t r_t d_t^2 / 2 with the ratio held, whatever the rewards: a mean over all tokens."""

    def teacher(new, at):
        tokens = [(g, i, t) for g, i in ROLLOUTS for t in steps(g, i)]
        return -0.7 * mean(ratio(at, *at_) * (new[at_] - REFERENCE[at_]) ** 2 / 2 for at_ in tokens)

    value, gradient = value_and_gradient(distillation(coef=0.7))
    assert value == pytest.approx(teacher(NEW, NEW), rel=1e-5)
    np.testing.assert_allclose(gradient, differences(teacher), rtol=1e-4, atol=1e-7)


def test_the_data_reach_every_branch():
    """Some tokens clipped above, some below, some not; GRPO and its relatives all differ."""
    r = np.exp(NEW - OLD)[np.arange(LENGTH) < LENGTHS[..., None]]
    assert (r > 1.28).any() and (r < 0.8).any() and ((r > 0.8) & (r < 1.2)).any()
    distinct = {name: value_and_gradient(cfg)[1].tobytes() for name, (cfg, _) in CASES.items()}
    assert distinct.pop("ppo_clip") == distinct["reinforce_pp"]
    assert len(set(distinct.values())) == len(distinct)


def test_every_preset_is_tested_and_makes_fresh_configs():
    assert {cfg_name.split()[0] for cfg_name in CASES} == PRESETS.keys()
    first = PRESETS["grpo"]()
    first.surrogate.set(low=0.9)
    assert PRESETS["grpo"]() != first
    assert isinstance(PRESETS["grpo"]().build().regulariser, type(NoRegulariser.Config().build()))


def test_dapo_takes_its_overlong_penalty_whole_or_not_at_all():
    cfg = PRESETS["dapo"](max_length=4, buffer=2)
    shaped = cfg.build().prepare(np.array([[1.0, 1.0, 0.0]]), np.ones((1, 3, 4), bool))
    plain = PRESETS["dapo"]().build().prepare(np.array([[1.0, 1.0, 0.0]]), np.ones((1, 3, 4), bool))
    np.testing.assert_allclose(shaped.arrays["advantages"], plain.arrays["advantages"], rtol=1e-5)
    assert cfg.reward_shaping is not None and PRESETS["dapo"]().reward_shaping is None
    with pytest.raises(UserError, match="both max_length and buffer"):
        PRESETS["dapo"](max_length=4)


def test_maxrl_with_rewards_that_may_be_negative_is_refused():
    shaping = SoftOverlongPenalty.Config(max_length=4, buffer=2)
    with pytest.raises(UserError, match=r"reward_shaping: expected None: shaped rewards may be negative"):
        PRESETS["maxrl"]().set(reward_shaping=shaping).build()
