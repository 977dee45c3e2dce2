"""The job of the simulation benchmark: the demo from random weights, with a reward that all can get."""

from experiments.demo.config import demo
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tests.benches.recovery.reward import ascii_share


def job(*, seed: int = 0, steps: int = 60) -> RLExperiment.Config:
    """Return 8 prompts x 16 samples an update, in leases of two prompts; without rewards there would be no updates."""
    cfg = demo(seed=seed, steps=steps)
    verifier = Verifier.Config(scorer=FunctionScorer.Config(function=ascii_share), processes=1)
    cfg.trainer.checkpoint.set(save_every=10)
    return cfg.set(verifier=verifier, warm_start=None, evaluation=None, prompts_per_step=8, groups_per_lease=2)


def evaluated_job(*, seed: int = 0, steps: int = 60) -> RLExperiment.Config:
    """Return `job` with an evaluation of three problems every eight updates, in leases of two and of one."""
    return job(seed=seed, steps=steps).set(evaluation=Evaluation.Config(problems_per_family=1), evaluate_every=8)
