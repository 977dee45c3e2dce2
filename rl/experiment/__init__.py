"""One RL experiment: its config, and the roles that are built from it."""

from rl.experiment.config import Runtime
from rl.experiment.experiment import RLExperiment

__all__ = ["RLExperiment", "Runtime"]
