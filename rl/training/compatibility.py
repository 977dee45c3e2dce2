"""Refusals of an objective that cannot work with the sizes of an experiment: each names the field and the way out."""

from typing import Any, Protocol

from axlearn_like.config import ConfigBase
from axlearn_like.training.alignment.reference import Reference
from rl.objective import MaxLengthMean, Objective, SoftOverlongPenalty
from rl.training.updates import Updates
from rl.verification.scorers import check_positive


class _Sizes(Protocol):
    """The fields of an experiment's config that an objective has to fit."""

    samples_per_prompt: int
    max_new_tokens: int
    prompts_per_step: int
    verifier: ConfigBase[Any]

    def require(self, field: str, fits: bool, expected: str) -> None:
        """Raise a ConfigError that names the field unless it fits."""
        ...


class _Trainer(Protocol):
    """The fields of a trainer's config that an objective has to fit."""

    updates: Updates.Config | None
    reference: Reference.Config | None
    head_tile: int | None

    def require(self, field: str, fits: bool, expected: str) -> None:
        """Raise a ConfigError that names the field unless it fits."""
        ...


def check_objective(cfg: Objective.Config, sizes: _Sizes, trainer: _Trainer) -> None:
    """Refuse an objective that learns nothing from groups of this size, fails on long rollouts, or lacks a policy.

    Raises:
        ConfigError: names the field.
    """
    advantage, samples, max_new_tokens = cfg.advantage.build(), sizes.samples_per_prompt, sizes.max_new_tokens
    compared = (
        f"{advantage.min_group_size} or more: {type(advantage).__name__} compares rollouts of one prompt and leaves "
        "out a prompt with fewer (objective.advantage=BatchAdvantage.Config() or RawReward.Config() needs no group)"
    )
    sizes.require("samples_per_prompt", samples >= advantage.min_group_size, compared)
    if isinstance(aggregation := cfg.aggregation, MaxLengthMean.Config):
        fits = aggregation.max_length >= max_new_tokens
        aggregation.require(
            "max_length", fits, f"max_new_tokens={max_new_tokens} or more: rollouts may have as many tokens"
        )
    if isinstance(shaping := cfg.reward_shaping, SoftOverlongPenalty.Config):
        begins = shaping.max_length - shaping.buffer
        acts = begins < max_new_tokens
        expected = f"less than buffer + max_new_tokens={shaping.buffer + max_new_tokens}: "
        expected += f"no rollout has more than {max_new_tokens} tokens, "
        shaping.require("max_length", acts, f"{expected}so the penalty, which begins at {begins}, would never act")
    if advantage.needs_positive:
        name = type(cfg.advantage).__owner__.__name__
        why = f"objective.advantage={name} divides by their mean (MaxRL); GroupAdvantage.Config() takes any"
        check_positive(sizes.verifier, why)
    _check_policies(cfg, sizes, trainer)


def _check_policies(cfg: Objective.Config, sizes: _Sizes, trainer: _Trainer) -> None:
    """Refuse terms that compare with a policy that is not there, and policies that no term compares with."""
    if trainer.updates is not None:
        several, parts = trainer.updates.count > 1, trainer.updates.minibatches
        kept = (
            "'recompute' or 'behaviour' with several updates a batch (trainer.updates): after the first one the policy"
        )
        cfg.require("old_policy", cfg.old_policy != "current" or not several, f"{kept} is not the one at their start")
        trainer.updates.require(
            "minibatches", parts <= sizes.prompts_per_step, f"at most prompts_per_step={sizes.prompts_per_step}"
        )
    objective = cfg.build()
    penalised, exact = objective.needs_divergence, objective.needs_exact_kl
    needed = objective.needs_reference or penalised or exact
    ways = "FrozenCopy.Config(), WithoutAdapters.Config() (LoRA), MovingAverage.Config() or Teacher.Config()"
    given = not needed or trainer.reference is not None
    cfg.require(
        "reward_shaping" if penalised else "regulariser",
        given,
        f"trainer.reference, {ways}, with a term that compares with a reference policy",
    )
    read = needed or trainer.reference is None
    trainer.require("reference", read, "None where no term of the objective compares with a reference policy")
    tiles = (
        "a multiple of 128, such as 2048, with ReferenceKL.Config(estimator='exact'), a sum over tiles of words "
        "(--apply exact_kl sets both)"
    )
    trainer.require("head_tile", trainer.head_tile is not None or not exact, tiles)
