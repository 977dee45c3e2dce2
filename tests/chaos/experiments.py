"""Experiments to disturb, and the same without anyone who disturbs."""

import time

from rl.experiment import RLExperiment
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tests.chaos.flaky_server import FlakyServer
from tests.rl.tiny import ascii_share, tiny_experiment


def slow_share(problem_id: int, answer: str) -> float:
    """The tiny experiment's reward, later: an update takes a third of a second and no CPU."""
    time.sleep(0.02)
    return ascii_share(problem_id, answer)


def endless(**changes: object) -> RLExperiment.Config:
    """The tiny experiment with no last step worth the name and a checkpoint every three; ended by SIGTERM."""
    verifier = Verifier.Config(scorer=FunctionScorer.Config(function=slow_share), processes=1)
    cfg = tiny_experiment(num_steps=100_000, evaluation=None, verifier=verifier).set(**changes)
    cfg.trainer.checkpoint.set(save_every=3, keep=3)
    return cfg


def flaky(**changes: object) -> RLExperiment.Config:
    """With connections to the parameter server that break."""
    return endless(parameter_server=FlakyServer.Config(), **changes)


def flaky_behind() -> RLExperiment.Config:
    """The same, one version behind."""
    return flaky(staleness=1)


def group() -> RLExperiment.Config:
    """With a trainer of two processes."""
    cfg = flaky()
    cfg.trainer.set(processes=2, mesh={"fsdp": 2})
    return cfg


def skewed() -> RLExperiment.Config:
    """With clocks hours apart as well. To be imported in processes of its own only."""
    from tests.chaos.skewed import SkewedServer

    return endless(parameter_server=SkewedServer.Config())


def calm(num_steps: int, staleness: int = 0) -> RLExperiment.Config:
    """What `endless` must give after so many updates: in one process, without waiting, one save at the end."""
    verifier = InlineVerifier.Config(scorer=FunctionScorer.Config(function=ascii_share))
    cfg = endless(num_steps=num_steps, staleness=staleness, verifier=verifier)
    cfg.trainer.checkpoint.set(save_every=10 * num_steps + 10)
    return cfg
