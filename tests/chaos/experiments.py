"""Experiments into which faults are injected, and the same experiments undisturbed."""

import time

from axlearn_like.training.alignment.reference import FrozenCopy
from rl.controller.controller import Controller
from rl.controller.prompt_pool import PromptPool
from rl.experiment import RLExperiment
from rl.fleet.fleet import Fleet
from rl.objective.presets import grpo
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tests.chaos.flaky_server import FlakyServer
from tests.chaos.held_server import HeldServer
from tests.rl.tiny import ascii_share, tiny_experiment


def slow_share(problem_id: int, answer: str) -> float:
    """Return the tiny experiment's reward after a sleep: an update takes a third of a second and no CPU."""
    time.sleep(0.02)
    return ascii_share(problem_id, answer)


def endless(**changes: object) -> RLExperiment.Config:
    """Return the tiny experiment with a checkpoint every three steps, and so many steps that only SIGTERM ends it."""
    verifier = Verifier.Config(scorer=FunctionScorer.Config(function=slow_share), processes=1)
    cfg = tiny_experiment(num_steps=100_000, evaluation=None, verifier=verifier).set(**changes)
    cfg.trainer.checkpoint.set(save_every=3, keep=3)
    return cfg


def flaky(**changes: object) -> RLExperiment.Config:
    """Return `endless` with connections to the parameter server that break."""
    return endless(parameter_server=FlakyServer.Config(), **changes)


def flaky_behind() -> RLExperiment.Config:
    """Return `flaky` with a staleness of one version."""
    return flaky(staleness=1)


def held() -> RLExperiment.Config:
    """Return `endless` with a parameter server whose reads a test can hold up."""
    return endless(parameter_server=HeldServer.Config())


def trainer_group() -> RLExperiment.Config:
    """Return `flaky` with a trainer process group of two."""
    cfg = flaky()
    cfg.trainer.set(processes=2, mesh={"fsdp": 2})
    return cfg


def skewed() -> RLExperiment.Config:
    """Return `endless` with broken connections, clocks hours apart, a plan by earlier results, and a reference role.

    Import it only in processes of its own.
    """
    from tests.chaos.skewed import SkewedServer

    cfg = compared(endless(parameter_server=SkewedServer.Config(), controller=curated()))
    return cfg.set(fleet=Fleet.Config(reference="cpu:1"))


def compared(cfg: RLExperiment.Config) -> RLExperiment.Config:
    """Let the objective hold the policy near version 0; returns the config."""
    cfg.trainer.reference = FrozenCopy.Config()
    return cfg.set(objective=grpo(kl_coef=0.1).set(old_policy="current", zero_variance="drop"))


def curated() -> Controller.Config:
    """Return a controller that draws problems again, and others for groups without a gradient."""
    pool = PromptPool.Config(explore=0.3, width=1.0, correct_threshold=0.6, retire_at=1.0)
    return Controller.Config(pool=pool, oversample=1.5)


def calm(num_steps: int, staleness: int = 0, *, like_skewed: bool = False) -> RLExperiment.Config:
    """Return `endless` with a last step, in one process, without sleeps, saved once at the end: the expected result.

    With `like_skewed` the trainer scores by the reference.
    """
    verifier = InlineVerifier.Config(scorer=FunctionScorer.Config(function=ascii_share))
    cfg = endless(num_steps=num_steps, staleness=staleness, verifier=verifier)
    if like_skewed:
        cfg = compared(cfg).set(controller=curated())
    cfg.trainer.checkpoint.set(save_every=10 * num_steps + 10)
    return cfg
