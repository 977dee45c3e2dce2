"""Refusals of an objective and a reference policy that do not fit each other: each names the field and the way out."""

from typing import Any

from rl.objective import Objective


def check_policies(cfg: Objective.Config, trainer: Any) -> None:
    """Refuse terms without the policy that they compare with, and such a policy without terms (ConfigError)."""
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
