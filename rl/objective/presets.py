"""Named algorithms as combinations of components; every call makes a new config to edit.

Where a paper leaves a choice open, or this form differs from it, the docstring says so.
`docs/concepts/presets.md` has the table.
"""

from collections.abc import Callable
from typing import Any, Literal

from axlearn_like.config import ConfigBase
from mesh.errors import UserError
from rl.objective.advantage import (
    AcceptedOnly,
    Advantage,
    BatchAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    NoAdvantage,
    OptimalBaselineAdvantage,
    RawReward,
    SuccessNormalisedAdvantage,
)
from rl.objective.aggregation import (
    MaxLengthMean,
    PromptMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
)
from rl.objective.gae import CriticConfig, GeneralisedAdvantage, RewardToGo
from rl.objective.objective import Objective
from rl.objective.parts import TurnAdvantage
from rl.objective.regulariser import NoRegulariser, ReferenceKL, Regulariser
from rl.objective.reward_shaping import ReferencePenalty, RewardShaping, SoftOverlongPenalty
from rl.objective.surrogate import (
    ClippedSurrogate,
    ClippedWeightLogProbability,
    LogProbability,
    MixedPolicy,
    SoftGate,
)


def grpo(*, kl_coef: float = 0.0) -> Objective.Config:
    """GRPO (arXiv 2402.03300, outcome reward). kl_coef adds its k3 term; the paper has 0.04."""
    return Objective.Config(
        advantage=GroupAdvantage.Config(normalise_std=True),
        aggregation=SequenceMean.Config(),
        surrogate=ClippedSurrogate.Config(low=0.2, high=0.2),
        regulariser=_kl(kl_coef, "k3"),
    )


def dr_grpo(*, max_length: int) -> Objective.Config:
    """Dr.GRPO (arXiv 2503.20783): no division by the deviation, constant length divisor."""
    return Objective.Config(
        advantage=GroupAdvantage.Config(normalise_std=False),
        aggregation=MaxLengthMean.Config(max_length=max_length),
        surrogate=ClippedSurrogate.Config(low=0.2, high=0.2),
    )


def dapo(*, max_length: int | None = None, buffer: int | None = None) -> Objective.Config:
    """DAPO (arXiv 2503.14476): clip-higher, token mean, zero-variance groups dropped.

    Given `max_length` and `buffer`, also its soft overlong penalty. The paper refills the batch after dropping
    ("dynamic sampling"): set `controller.oversample` of the experiment, or batches shrink.
    """
    if (max_length is None) != (buffer is None):
        raise UserError("dapo needs both max_length and buffer, or neither")
    shaping: RewardShaping.Config | None = None
    if max_length is not None and buffer is not None:
        shaping = SoftOverlongPenalty.Config(max_length=max_length, buffer=buffer)
    return Objective.Config(
        advantage=GroupAdvantage.Config(normalise_std=True),
        aggregation=TokenMean.Config(),
        surrogate=ClippedSurrogate.Config(low=0.2, high=0.28),
        reward_shaping=shaping,
        zero_variance="drop",
    )


def gspo() -> Objective.Config:
    """GSPO (arXiv 2507.18071): the clip acts on the geometric mean ratio of the sequence."""
    return Objective.Config(
        advantage=GroupAdvantage.Config(normalise_std=True),
        aggregation=SequenceMean.Config(),
        surrogate=ClippedSurrogate.Config(low=3e-4, high=4e-4, level="sequence"),
    )


def gspo_token(*, advantage: ConfigBase[Advantage] | None = None) -> Objective.Config:
    """GSPO-token (arXiv 2507.18071, eq. 13): the ratio of the sequence, and an advantage of each token's own.

    `advantage`: one of tokens, such as `GeneralisedAdvantage`; None: by turn. Where the tokens of a rollout share one,
    values and gradients are those of `gspo`, whose paper defines it for the other case.
    """
    return gspo().set(advantage=TurnAdvantage.Config() if advantage is None else advantage)


def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Objective.Config:
    """SAPO (arXiv 2511.20347): a sigmoid gate on the token's ratio, steeper where the advantage is negative."""
    return Objective.Config(
        advantage=GroupAdvantage.Config(normalise_std=True),
        aggregation=SequenceMean.Config(),
        surrogate=SoftGate.Config(tau_pos=tau_pos, tau_neg=tau_neg),
    )


def cispo(*, high: float = 0.28) -> Objective.Config:
    """CISPO (arXiv 2506.13585): the detached ratio is clipped, no token loses its gradient.

    The paper clips only above and does not publish the bound; `high` is to be tuned.
    """
    return Objective.Config(
        advantage=GroupAdvantage.Config(normalise_std=True),
        aggregation=TokenMean.Config(),
        surrogate=ClippedWeightLogProbability.Config(low=1.0, high=high),
    )


def scale_rl(*, cap: float = 4.0) -> Objective.Config:
    """The loss of ScaleRL (arXiv 2510.13786): CISPO, prompt mean, batch-normalised advantage.

    The ratio is taken against mu directly (old_policy="behaviour") and limited to `cap`.
    """
    return Objective.Config(
        advantage=BatchAdvantage.Config(centre="group"),
        aggregation=PromptMean.Config(),
        surrogate=ClippedWeightLogProbability.Config(low=1.0, high=cap - 1.0),
        zero_variance="drop",
        old_policy="behaviour",
    )


def luffy(*, max_length: int, gamma: float = 0.1) -> Objective.Config:
    """LUFFY (arXiv 2504.14945): demonstrations in the groups, shaped by pi / (pi + gamma) and not clipped.

    Its experiments take Dr.GRPO's advantage and divisor. They need `demonstrations` of the experiment.
    """
    return dr_grpo(max_length=max_length).set(surrogate=MixedPolicy.Config(gamma=gamma))


def rloo() -> Objective.Config:
    """RLOO (arXiv 2402.14740): leave-one-out baseline, log-probability of the whole sequence."""
    return Objective.Config(
        advantage=LeaveOneOutAdvantage.Config(),
        aggregation=SequenceSum.Config(),
        surrogate=LogProbability.Config(),
    )


def opo() -> Objective.Config:
    """OPO (arXiv 2505.23585): REINFORCE with the baseline of least variance, rewards weighted by length.

    The paper is exactly on-policy: one update a batch, `staleness=0`, no KL, no entropy bonus.
    """
    return Objective.Config(
        advantage=OptimalBaselineAdvantage.Config(),
        aggregation=SequenceSum.Config(),
        surrogate=LogProbability.Config(),
    )


def reinforce(*, baseline: float = 0.0) -> Objective.Config:
    """REINFORCE (Williams 1992) with a constant baseline."""
    return Objective.Config(
        advantage=RawReward.Config(baseline=baseline),
        aggregation=SequenceSum.Config(),
        surrogate=LogProbability.Config(),
    )


def reinforce_pp(*, group_baseline: bool = False, kl_coef: float = 0.0, reward_kl: float = 0.0) -> Objective.Config:
    """REINFORCE++ (arXiv 2501.03262): advantages normalised over the batch, PPO clip.

    group_baseline: its variant "w/ Baseline"; `kl_coef` adds the k2 term of that variant. `reward_kl` adds the penalty
    in the reward of the plain variant, k1 of each token; advantages are then those of tokens, and so are their mean and
    deviation, which are otherwise those of rollouts.
    """
    if group_baseline and reward_kl:
        raise UserError("reinforce_pp: reward_kl needs group_baseline=False; the variant with it has kl_coef")
    by_rollout = BatchAdvantage.Config(centre="group" if group_baseline else "batch")
    return Objective.Config(
        advantage=RewardToGo.Config() if reward_kl else by_rollout,
        reward_shaping=_token_penalty(reward_kl),
        aggregation=TokenMean.Config(),
        surrogate=ClippedSurrogate.Config(low=0.2, high=0.2),
        regulariser=_kl(kl_coef, "k2"),
    )


def ppo_clip() -> Objective.Config:
    """The clipped objective of PPO (arXiv 1707.06347) without a critic; with one: `ppo`.

    Advantages are whitened rewards (what GAE gives for gamma = lambda = 1 and a constant value).
    """
    return Objective.Config(
        advantage=BatchAdvantage.Config(centre="batch"),
        aggregation=TokenMean.Config(),
        surrogate=ClippedSurrogate.Config(low=0.2, high=0.2),
    )


def maxrl() -> Objective.Config:
    """MaxRL (arXiv 2602.02710, algorithm 1): (r - mean) / mean, for rewards 0 or 1.

    The paper's estimator is on-policy: score of the whole sequence, mean over the group.
    """
    return Objective.Config(
        advantage=SuccessNormalisedAdvantage.Config(),
        aggregation=SequenceSum.Config(),
        surrogate=LogProbability.Config(),
    )


def ppo(
    critic: CriticConfig[Any], *, gamma: float = 1.0, lam: float = 0.95, reward_kl: float = 0.0
) -> Objective.Config:
    """PPO (arXiv 1707.06347) with whitened GAE and a critic of rl.training.critic (`Critic`, `SharedCritic`).

    reward_kl: coefficient of the penalty of each token against `trainer.reference` (InstructGPT, arXiv 2203.02155).
    """
    return Objective.Config(
        reward_shaping=_token_penalty(reward_kl),
        advantage=GeneralisedAdvantage.Config(critic=critic, gamma=gamma, lam=lam),
        aggregation=TokenMean.Config(),
        surrogate=ClippedSurrogate.Config(low=0.2, high=0.2),
    )


def rejection_sampling(*, at_least: float = 1.0) -> Objective.Config:
    """Expert iteration, rejection sampling (STaR, arXiv 2203.14465; RAFT, 2304.06767; ReST-EM, 2312.06585).

    The loss is that of supervised fine-tuning on the rollouts with a reward of `at_least`: a mean over their tokens. A
    round is a batch, a large one, and `trainer.updates` the fine-tuning on it.
    """
    return Objective.Config(
        advantage=AcceptedOnly.Config(at_least=at_least),
        aggregation=TokenMean.Config(),
        surrogate=LogProbability.Config(),
    )


def distillation(*, coef: float = 1.0, exact: bool = False) -> Objective.Config:
    """Distillation on-policy: KL(pi || teacher) on the policy's own rollouts, token by token (arXiv 2306.13649, 3).

    The teacher is `trainer.reference` (`Teacher.Config`). Its gradient is that of each token's divergence given what is
    before it; what a token does to later ones is left out, as by a discount of 0. Rewards are measured only.
    `exact`: the divergence is of whole distributions, not estimated by the tokens that were drawn.
    """
    estimate = {"estimator": "exact"} if exact else {"estimator": "k2", "ratio": "detached"}
    return Objective.Config(
        advantage=NoAdvantage.Config(),
        aggregation=TokenMean.Config(),
        surrogate=LogProbability.Config(),
        regulariser=ReferenceKL.Config(coef=coef).set(**estimate),
    )


def _kl(coef: float, estimator: Literal["k2", "k3"]) -> Regulariser.Config:
    if coef == 0.0:
        return NoRegulariser.Config()
    return ReferenceKL.Config(coef=coef, estimator=estimator)


def _token_penalty(coef: float) -> RewardShaping.Config | None:
    return ReferencePenalty.Config(coef=coef, level="token") if coef else None


PRESETS: dict[str, Callable[..., Objective.Config]] = {
    preset.__name__: preset
    for preset in (
        grpo,
        dr_grpo,
        dapo,
        gspo,
        gspo_token,
        sapo,
        cispo,
        scale_rl,
        luffy,
        rloo,
        opo,
        reinforce,
        reinforce_pp,
        ppo_clip,
        maxrl,
        rejection_sampling,
    )
}
