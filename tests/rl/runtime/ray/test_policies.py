"""Several policies with their roles in processes: every role is killed, and each policy keeps its bits."""

import os
import signal
from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from experiments.modifiers import low_rank
from rl.experiment import RLExperiment
from rl.runtime.policies.runs import open_policy_runs
from rl.runtime.ray.runtime import run_ray
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, slow

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("shared_session")]

POLICIES = {"first": {}, "second": {"seed": 5, "learner.schedule.lr": 3e-3}}


def fleet(*, whole: bool = False) -> RLExperiment.Config:
    cfg = slow(staleness=1, num_steps=8)
    if not whole:
        low_rank(cfg)
    cfg.trainer.checkpoint.set(save_every=1)
    return cfg.set(policies=POLICIES)


def run_with_ray(path: Path, cfg: RLExperiment.Config, roles: list[str]) -> None:
    """Run with every role in a process, and kill these roles one after the other, two updates apart."""
    left, killed, since = list(roles), dict[str, int](), 0

    def look(step: int) -> None:
        nonlocal since
        back = all(len(events(path, "start", role)) > 1 for role in killed)
        if left and back and step >= since + 2:
            role, since = left.pop(0), step
            killed[role] = events(path, "start", role)[-1]["pid"]
            os.kill(killed[role], signal.SIGKILL)

    experiment = cfg.build()
    with RunDirectory.open(path, to_text(cfg)) as run, open_policy_runs(experiment, run):
        run_ray(experiment, run, lambda: False, look, lambda line: None)
    assert list(killed) == roles


@pytest.mark.full
@pytest.mark.parametrize(
    ("roles", "whole"),
    [
        (["worker-0", "trainer"], False),
        (["controller", "parameter-server", "verifier", "worker-1"], False),
        (["worker-0", "trainer", "parameter-server"], True),
    ],
)
def test_roles_that_are_killed_cost_no_policy_a_bit(roles: list[str], whole: bool, tmp_path: Path) -> None:
    run_with_ray(tmp_path / "killed", fleet(whole=whole), roles)
    run_with_ray(tmp_path / "unharmed", fleet(whole=whole), [])
    for name in POLICIES:
        assert_same_outcome(*(tmp_path / folder / "policies" / name for folder in ("killed", "unharmed")))
