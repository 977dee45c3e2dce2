"""Refusals of an objective that cannot work with the sizes of an experiment: each names the field and the way out."""

from typing import Protocol

from rl.objective import MaxLengthMean, Objective, SoftOverlongPenalty


class Sizes(Protocol):
    """The fields of an experiment's config that an objective has to fit."""

    samples: int
    max_new: int

    def require(self, field: str, fits: bool, expected: str) -> None:
        """Raise a ConfigError that names the field unless it fits."""
        ...


def check_objective(cfg: Objective.Config, sizes: Sizes) -> None:
    """Refuse an objective that would learn nothing from groups of this size, or fail on its longest rollouts.

    Raises:
        ConfigError: names the field.
    """
    advantage, samples, max_new = cfg.advantage.build(), sizes.samples, sizes.max_new
    compared = (
        f"{advantage.min_group_size} or more: {type(advantage).__name__} compares rollouts of one prompt and leaves "
        "out a prompt with fewer (objective.advantage=BatchAdvantage.Config() or RawReward.Config() needs no group)"
    )
    sizes.require("samples", samples >= advantage.min_group_size, compared)
    if isinstance(aggregation := cfg.aggregation, MaxLengthMean.Config):
        fits = aggregation.max_length >= max_new
        aggregation.require("max_length", fits, f"max_new={max_new} or more: rollouts may have as many tokens")
    if isinstance(shaping := cfg.reward_shaping, SoftOverlongPenalty.Config):
        begins = shaping.max_length - shaping.buffer
        acts = begins < max_new
        expected = f"less than buffer + max_new={shaping.buffer + max_new}: no rollout has more than {max_new} tokens, "
        shaping.require("max_length", acts, f"{expected}so the penalty, which begins at {begins}, would never act")
    free = not cfg.build().needs_reference
    cfg.require("regulariser", free, "terms that need no reference policy (NoRegulariser, EntropyBonus): there is none")
