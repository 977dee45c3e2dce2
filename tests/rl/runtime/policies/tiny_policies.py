"""The tiny experiment of tests with several policies."""

from typing import Any

from experiments.modifiers import low_rank
from rl.experiment import RLExperiment
from tests.rl.tiny import tiny_experiment


def tiny_policies(policies: dict[str, dict[str, Any]], **changes: Any) -> RLExperiment.Config:
    """Return the tiny experiment as LoRA of rank 4 on all matrices, with these policies."""
    cfg = tiny_experiment(**changes)
    low_rank(cfg)
    return cfg.set(policies=policies)


def tiny_wholes(policies: dict[str, dict[str, Any]], **changes: Any) -> RLExperiment.Config:
    """Return the tiny experiment with these policies, each a whole model."""
    return tiny_experiment(**changes).set(policies=policies)
