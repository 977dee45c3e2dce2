"""The job of the simulation benchmark: the demo's policy and tasks from random weights, without its warm start."""

from experiments.demo.config import demo
from rl.experiment import RLExperiment


def job(*, seed: int = 0, steps: int = 60) -> RLExperiment.Config:
    """Return 8 prompts x 16 samples an update, in leases of two prompts."""
    cfg = demo(seed=seed, steps=steps)
    return cfg.set(warm_start=None, evaluation=None, prompts_per_step=8, groups_per_lease=2)
