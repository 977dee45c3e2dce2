"""The run that is launched: small, without a warm start, with a reward that takes time, so that it can be hit."""

import time

from experiments.reasoning_gym import demo
from rl.experiment import RLExperiment
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier


def ascii_share(problem_id: int, answer: str) -> float:
    """Return the share of ASCII characters in an answer, after a pause."""
    del problem_id
    time.sleep(0.02)
    return sum(character.isascii() for character in answer) / max(len(answer), 1)


def job(*, seed: int = 0, steps: int = 150) -> RLExperiment.Config:
    """Sixteen rollouts an update, a third of a second each."""
    cfg = demo(seed=seed, steps=steps).set(warm_start=None, evaluation=None, groups=4, samples=4, groups_per_lease=1)
    cfg.trainer.checkpoint.set(save_every=10)
    cfg.verifier = Verifier.Config(scorer=FunctionScorer.Config(function=ascii_share), processes=1)
    return cfg
