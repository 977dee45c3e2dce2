"""Objectives as their papers write them: sums over prompts, rollouts and tokens in float64, on ragged data.

`paper(new, at)` is J at log-probabilities `new`; `at` is the point of differentiation, used wherever the paper stops a
gradient. Nothing of `rl.objective` computes anything here. Groups have 3, 5, 7, 4 and 2 rollouts of 1 to 5 tokens; one
has no spread, one has a single score; rollouts are unscored, truncated, or hold a tool's tokens.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np

from axlearn_like.learner import AdamW, Constant, Learner
from rl.objective import (
    PRESETS,
    GeneralisedAdvantage,
    GroupAdvantage,
    Objective,
    ReferencePenalty,
    SoftOverlongPenalty,
    TruncatedImportance,
)
from rl.objective.presets import distillation
from rl.objective.presets import ppo as ppo_preset
from rl.training.critic import Critic

SIZES = (3, 5, 7, 4, 2)
MOST, LENGTH = max(SIZES), 5
RNG = np.random.default_rng(7)
SHAPE = (len(SIZES), MOST)
LENGTHS = RNG.integers(1, LENGTH + 1, size=SHAPE)
REWARDS = np.zeros(SHAPE)
for _g, _rewards in enumerate(([0, 1, 1], [0, 0, 1, 0, 1], [1, 0, 0, 0, 1, 0, 1], [0.85] * 4, [1, 0])):
    REWARDS[_g, : len(_rewards)] = _rewards
UNSCORED = {(1, 1), (2, 6), (3, 2), (4, 1)}
TRUNCATED = {(0, 2), (2, 3), (3, 0)}
LENGTHS[2, 0] = LENGTHS[1, 2] = LENGTH
# Rollouts of two turns: the end of the first one's tokens, and its reward, which is part of the rollout's.
TURNS = {(1, 0): (1, 0.0), (1, 4): (2, 0.5), (2, 0): (1, 0.25), (2, 1): (2, 0.5), (2, 3): (2, 0.0)}
TOOL = {(2, 0, 1), (2, 0, 2), (1, 2, 0)}  # tokens that the policy did not sample

DEMONSTRATIONS = {(0, 0), (1, 2), (2, 6), (4, 0)}  # where the objective knows any: of both signs, one without a score

OLD = RNG.normal(-1.5, 0.3, (*SHAPE, LENGTH))
MU = OLD + RNG.normal(0, 0.1, OLD.shape)
MU[0, 0] -= 1.0  # a rollout that another policy has drawn
REFERENCE = OLD + RNG.normal(0, 0.3, OLD.shape)
NEW = OLD + RNG.normal(0, 0.35, OLD.shape)
VALUES = RNG.uniform(0, 1, OLD.shape)  # a critic's, before each token

Rollout = tuple[int, int]
Paper = Callable[[np.ndarray, np.ndarray], float]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def std(values: Iterable[float]) -> float:
    values = list(values)
    return math.sqrt(mean((v - mean(values)) ** 2 for v in values))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, 1 - low), 1 + high)


def ppo(r: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(r * a, clip(r, low, high) * a)


def scored(g: int) -> list[Rollout]:
    return [(g, i) for i in range(SIZES[g]) if (g, i) not in UNSCORED]


def prompts(least: int = 2, *, spread: bool = False, whole: bool = False) -> list[list[Rollout]]:
    """The rollouts that count, by prompt: of `least` scores, of unequal ones if `spread`, not cut off if `whole`."""
    found = [scored(g) for g in range(len(SIZES)) if len(scored(g)) >= least]
    found = [group for group in found if not spread or std(REWARDS[x] for x in group) > 0]
    return [kept for group in found if (kept := [x for x in group if not (whole and x in TRUNCATED)])]


def steps(x: Rollout) -> list[tuple[int, int, int]]:
    return [(*x, t) for t in range(LENGTHS[x]) if (*x, t) not in TOOL]


def tokens(groups: list[list[Rollout]]) -> list[tuple[int, int, int]]:
    return [at for group in groups for x in group for at in steps(x)]


def ratio(new: np.ndarray, at: tuple[int, int, int]) -> float:
    return math.exp(new[at] - OLD[at])


def rewards(g: int) -> list[float]:
    return [REWARDS[x] for x in scored(g)]


def grpo_advantage(x: tuple[int, ...]) -> float:
    of_group = rewards(x[0])
    return (REWARDS[x[0], x[1]] - mean(of_group)) / (std(of_group) + 1e-6)


def by_rollout(groups: list[list[Rollout]], term: Callable[[tuple[int, int, int]], float]) -> float:
    """Mean over tokens, over the rollouts of a prompt, over prompts."""
    return mean(mean(mean(term(at) for at in steps(x)) for x in group) for group in groups)


def grpo(new: np.ndarray, at: np.ndarray, kl_coef: float = 0.0) -> float:
    def token(t: tuple[int, int, int]) -> float:
        d = REFERENCE[t] - new[t]
        return ppo(ratio(new, t), grpo_advantage(t)) - kl_coef * (math.exp(d) - d - 1)

    return by_rollout(prompts(), token)


def grpo_kl(new: np.ndarray, at: np.ndarray) -> float:
    return grpo(new, at, kl_coef=0.04)


def grpo_stale(new: np.ndarray, at: np.ndarray) -> float:
    """Truncated importance sampling; rollouts that were cut off, and groups without spread, are left out."""
    groups = prompts(spread=True, whole=True)
    weight = lambda t: min(math.exp(OLD[t] - MU[t]), 2.0)  # noqa: E731
    return by_rollout(groups, lambda t: weight(t) * ppo(ratio(new, t), grpo_advantage(t)))


def dr_grpo(new: np.ndarray, at: np.ndarray) -> float:
    def rollout(x: Rollout) -> float:
        return sum(ppo(ratio(new, t), REWARDS[x] - mean(rewards(x[0]))) for t in steps(x)) / 16

    return mean(mean(rollout(x) for x in group) for group in prompts())


def luffy(new: np.ndarray, at: np.ndarray, weight: Callable[[tuple[int, int, int]], float] = lambda t: 1.0) -> float:
    """Demonstrations in the groups' mean, and at their tokens p / (p + 0.1) for the ratio, without a clip."""

    def token(t: tuple[int, int, int]) -> float:
        advantage = REWARDS[t[:2]] - mean(rewards(t[0]))
        if t[:2] in DEMONSTRATIONS:
            return math.exp(new[t]) / (math.exp(new[t]) + 0.1) * advantage
        return weight(t) * ppo(ratio(new, t), advantage)

    return mean(mean(sum(token(t) for t in steps(x)) / 16 for x in group) for group in prompts())


def luffy_stale(new: np.ndarray, at: np.ndarray) -> float:
    """Weights pi_old / mu of the tokens that mu drew."""
    return luffy(new, at, lambda t: min(math.exp(OLD[t] - MU[t]), 1.1))


def dapo(new: np.ndarray, at: np.ndarray) -> float:
    return mean(ppo(ratio(new, t), grpo_advantage(t), 0.2, 0.28) for t in tokens(prompts(spread=True)))


def dapo_overlong(new: np.ndarray, at: np.ndarray) -> float:
    """Equation 13: 0 up to 2 tokens, -1 at 5, before the normalisation."""
    shaped = {x: REWARDS[x] + min(0.0, max(-1.0, (2 - len(steps(x))) / 3)) for g in prompts(spread=True) for x in g}

    def advantage(t: tuple[int, int, int]) -> float:
        of_group = [shaped[x] for x in scored(t[0])]
        return (shaped[t[:2]] - mean(of_group)) / (std(of_group) + 1e-6)

    return mean(ppo(ratio(new, t), advantage(t), 0.2, 0.28) for t in tokens(prompts(spread=True)))


def gspo(new: np.ndarray, at: np.ndarray) -> float:
    def sequence(x: Rollout) -> float:
        s = math.exp(mean(new[t] - OLD[t] for t in steps(x)))
        return ppo(s, grpo_advantage(x), 3e-4, 4e-4)

    return mean(mean(sequence(x) for x in group) for group in prompts())


def turn_advantage(t: tuple[int, int, int]) -> float:
    """GRPO's advantage of what a turn and those after it earn, among the rollouts that got to that turn."""

    def earned(x: Rollout, later: bool) -> float:
        return REWARDS[x] - (TURNS[x][1] if later else 0.0)

    later = t[:2] in TURNS and t[2] >= TURNS[t[:2]][0]
    others = [earned(x, later) for x in scored(t[0]) if x in TURNS or not later]
    return (earned(t[:2], later) - mean(others)) / (std(others) + 1e-6)


def gspo_token_by(advantage: Callable[[tuple[int, int, int]], float], groups: list[list[Rollout]]) -> Paper:
    """s_t = sg[s] pi_t / sg[pi_t], clipped, with an advantage of each token's own."""

    def paper(new: np.ndarray, at: np.ndarray) -> float:
        def token(t: tuple[int, int, int]) -> float:
            s = math.exp(mean(at[u] - OLD[u] for u in steps(t[:2])))
            return ppo(s * math.exp(new[t] - at[t]), advantage(t), 3e-4, 4e-4)

        return by_rollout(groups, token)

    return paper


def sapo(new: np.ndarray, at: np.ndarray) -> float:
    """4 / tau sigmoid(tau (r - 1)) A of each token, tau by the sign of its advantage."""

    def token(t: tuple[int, int, int]) -> float:
        advantage = grpo_advantage(t)
        tau = 1.0 if advantage > 0 else 2.5
        return 4 / tau / (1 + math.exp(-tau * (ratio(new, t) - 1))) * advantage

    return by_rollout(prompts(), token)


def cispo(new: np.ndarray, at: np.ndarray) -> float:
    return mean(min(ratio(at, t), 1.28) * grpo_advantage(t) * new[t] for t in tokens(prompts()))


def scale_rl(new: np.ndarray, at: np.ndarray) -> float:
    groups = prompts(spread=True)
    centred = {x: REWARDS[x] - mean(rewards(x[0])) for group in groups for x in group}
    spread = std(centred.values())

    def token(t: tuple[int, int, int]) -> float:
        return min(math.exp(at[t] - MU[t]), 1.5) * centred[t[:2]] / spread * new[t]

    return mean(mean(token(t) for x in group for t in steps(x)) for group in groups)


def logprob(new: np.ndarray, x: Rollout) -> float:
    return sum(new[t] for t in steps(x))


def rloo(new: np.ndarray, at: np.ndarray) -> float:
    def baseline(x: Rollout) -> float:
        return mean(REWARDS[y] for y in scored(x[0]) if y != x)

    return mean(mean((REWARDS[x] - baseline(x)) * logprob(new, x) for x in group) for group in prompts())


def opo(new: np.ndarray, at: np.ndarray) -> float:
    def baseline(g: int) -> float:
        return sum(len(steps(x)) * REWARDS[x] for x in scored(g)) / sum(len(steps(x)) for x in scored(g))

    return mean(mean((REWARDS[x] - baseline(x[0])) * logprob(new, x) for x in group) for group in prompts())


def reinforce(new: np.ndarray, at: np.ndarray) -> float:
    return mean(mean((REWARDS[x] - 0.5) * logprob(new, x) for x in group) for group in prompts(1))


def reinforce_pp(new: np.ndarray, at: np.ndarray) -> float:
    every = [REWARDS[x] for group in prompts(1) for x in group]
    centre, spread = mean(every), std(every)
    return mean(ppo(ratio(new, t), (REWARDS[t[:2]] - centre) / spread) for t in tokens(prompts(1)))


def reinforce_pp_baseline(new: np.ndarray, at: np.ndarray) -> float:
    centred = {x: REWARDS[x] - mean(rewards(x[0])) for group in prompts() for x in group}
    spread = std(centred.values())

    def token(t: tuple[int, int, int]) -> float:
        return ppo(ratio(new, t), centred[t[:2]] / spread) - 0.01 * 0.5 * (new[t] - REFERENCE[t]) ** 2

    return mean(token(t) for t in tokens(prompts()))


def maxrl(new: np.ndarray, at: np.ndarray) -> float:
    """Algorithm 1: sum_j (r_j - r) score_j / (N r) per prompt, nothing where r = 0."""

    def prompt(group: list[Rollout]) -> float:
        rate = mean(REWARDS[x] for x in group)
        return sum((REWARDS[x] - rate) * logprob(new, x) for x in group) / (len(group) * rate)

    return mean(prompt(group) for group in prompts())


def rejection_sampling(new: np.ndarray, at: np.ndarray) -> float:
    """Supervised fine-tuning: the mean log-probability of the tokens of accepted rollouts, groups of one included."""
    return mean(new[t] for t in tokens(prompts(1)) if REWARDS[t[:2]] == 1)


def distil(new: np.ndarray, at: np.ndarray) -> float:
    """The divergence from the teacher: sum_t r_t d_t^2 / 2 with the ratio held, a mean over all tokens."""
    return -0.7 * mean(ratio(at, t) * (new[t] - REFERENCE[t]) ** 2 / 2 for t in tokens(prompts(1)))


def token_rewards(x: Rollout, kl: float) -> list[float]:
    """The rollout's reward at its last token, and everywhere -kl (log mu - log ref)."""
    places = steps(x)
    given = [0.0] * (len(places) - 1) + [float(REWARDS[x])]
    return [r - kl * (MU[t] - REFERENCE[t]) for r, t in zip(given, places, strict=True)]


def whitened(found: dict[tuple[int, int, int], float]) -> dict[tuple[int, int, int], float]:
    centre, spread = mean(found.values()), std(found.values())
    return {t: (a - centre) / spread for t, a in found.items()}


def critic_advantages(kl: float = 0.0) -> dict[tuple[int, int, int], float]:
    """Equation 11 of arXiv 1506.02438 with gamma 1 and lambda 0.9: of sampled tokens, whitened over the batch."""
    found: dict[tuple[int, int, int], float] = {}
    for x in (x for group in prompts(1) for x in group):
        places = steps(x)
        values = [VALUES[t] for t in places]
        given = token_rewards(x, kl)
        deltas = [r + w - v for r, v, w in zip(given, values, [*values[1:], 0.0], strict=True)]
        for k, t in enumerate(places):
            found[t] = sum(0.9 ** (later - k) * deltas[later] for later in range(k, len(places)))
    return whitened(found)


def ppo_critic(new: np.ndarray, at: np.ndarray) -> float:
    return mean(ppo(ratio(new, t), a) for t, a in critic_advantages().items())


def ppo_token_kl(new: np.ndarray, at: np.ndarray) -> float:
    return mean(ppo(ratio(new, t), a) for t, a in critic_advantages(kl=0.3).items())


def reinforce_pp_token_kl(new: np.ndarray, at: np.ndarray) -> float:
    """A_t = r - beta sum_{i >= t} KL_i, of mean 0 and deviation 1 over the tokens of the batch."""
    found: dict[tuple[int, int, int], float] = {}
    for x in (x for group in prompts(1) for x in group):
        given = token_rewards(x, 0.3)
        found |= {t: sum(given[k:]) for k, t in enumerate(steps(x))}
    return mean(ppo(ratio(new, t), a) for t, a in whitened(found).items())


def rloo_kl(new: np.ndarray, at: np.ndarray) -> float:
    """The divergence of whole rollouts in the reward."""
    penalised = {x: REWARDS[x] - 0.3 * sum(MU[t] - REFERENCE[t] for t in steps(x)) for g in prompts() for x in g}

    def advantage(x: Rollout) -> float:
        return penalised[x] - mean(penalised[y] for y in scored(x[0]) if y != x)

    return mean(mean(advantage(x) * logprob(new, x) for x in group) for group in prompts())


CRITIC = Critic.Config(learner=Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3)))
STALE = PRESETS["grpo"]().set(importance=TruncatedImportance.Config(cap=2.0), zero_variance="drop", truncated="mask")
OVERLONG = PRESETS["dapo"]().set(reward_shaping=SoftOverlongPenalty.Config(max_length=5, buffer=3))
CASES: dict[str, tuple[Objective.Config, Paper]] = {
    "grpo": (PRESETS["grpo"](), grpo),
    "grpo with KL": (PRESETS["grpo"](kl_coef=0.04), grpo_kl),
    "grpo on stale rollouts": (STALE, grpo_stale),
    "dr_grpo": (PRESETS["dr_grpo"](max_length=16), dr_grpo),
    "luffy": (PRESETS["luffy"](max_length=16), luffy),
    "luffy on stale rollouts": (
        PRESETS["luffy"](max_length=16).set(importance=TruncatedImportance.Config(cap=1.1)),
        luffy_stale,
    ),
    "dapo": (PRESETS["dapo"](), dapo),
    "dapo with its penalty": (OVERLONG, dapo_overlong),
    "gspo": (PRESETS["gspo"](), gspo),
    "gspo_token": (PRESETS["gspo_token"](), gspo_token_by(turn_advantage, prompts())),
    "gspo_token with equal advantages": (
        PRESETS["gspo_token"](advantage=GroupAdvantage.Config()),
        gspo_token_by(grpo_advantage, prompts()),
    ),
    "gspo_token with a critic": (
        PRESETS["gspo_token"](advantage=GeneralisedAdvantage.Config(critic=CRITIC, lam=0.9)),
        gspo_token_by(critic_advantages().__getitem__, prompts(1)),
    ),
    "sapo": (PRESETS["sapo"](tau_neg=2.5), sapo),
    "cispo": (PRESETS["cispo"](), cispo),
    "scale_rl": (PRESETS["scale_rl"](cap=1.5), scale_rl),
    "rloo": (PRESETS["rloo"](), rloo),
    "rloo with KL in the reward": (PRESETS["rloo"]().set(reward_shaping=ReferencePenalty.Config(coef=0.3)), rloo_kl),
    "opo": (PRESETS["opo"](), opo),
    "reinforce": (PRESETS["reinforce"](baseline=0.5), reinforce),
    "reinforce_pp": (PRESETS["reinforce_pp"](), reinforce_pp),
    "reinforce_pp with baseline": (PRESETS["reinforce_pp"](group_baseline=True, kl_coef=0.01), reinforce_pp_baseline),
    "reinforce_pp with KL by token": (PRESETS["reinforce_pp"](reward_kl=0.3), reinforce_pp_token_kl),
    "ppo_clip": (PRESETS["ppo_clip"](), reinforce_pp),
    "maxrl": (PRESETS["maxrl"](), maxrl),
    "rejection_sampling": (PRESETS["rejection_sampling"](), rejection_sampling),
    "ppo": (ppo_preset(CRITIC, lam=0.9), ppo_critic),
    "ppo with KL by token": (ppo_preset(CRITIC, lam=0.9, reward_kl=0.3), ppo_token_kl),
    "distillation": (distillation(coef=0.7), distil),
}


def differences(paper: Paper, step: float = 1e-6) -> np.ndarray:
    """Gradient of J at NEW by central differences, float64; zero where no rollout is."""
    gradient = np.zeros(NEW.shape)
    for g, size in enumerate(SIZES):
        for at in ((g, i, t) for i in range(size) for t in range(LENGTHS[g, i])):
            up, down = NEW.copy(), NEW.copy()
            up[at] += step
            down[at] -= step
            gradient[at] = (paper(up, NEW) - paper(down, NEW)) / (2 * step)
    return gradient
