"""The run that is launched: small, without a warm start, with a reward that takes time, so that it can be hit."""

from experiments.reasoning_gym import demo
from rl.experiment import RLExperiment
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tools.bench.launch.reward import ascii_share


def job(*, seed: int = 0, steps: int = 150) -> RLExperiment.Config:
    """Sixteen rollouts an update, a third of a second each."""
    cfg = demo(seed=seed, steps=steps).set(warm_start=None, evaluation=None, groups=4, samples=4, groups_per_lease=1)
    cfg.trainer.checkpoint.set(save_every=10)
    cfg.verifier = Verifier.Config(scorer=FunctionScorer.Config(function=ascii_share), processes=1)
    return cfg
