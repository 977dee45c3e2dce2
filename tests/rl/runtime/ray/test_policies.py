"""Several policies with their roles in processes: every role is killed, and each policy keeps its bits."""

import os
import signal
from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from experiments.modifiers import low_rank
from rl.experiment import RLExperiment
from rl.runtime.policies.changes import policy_run
from rl.runtime.policies.requests import add_policy
from rl.runtime.policies.runs import open_policy_runs
from rl.runtime.ray.runtime import run_ray
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, metrics, slow

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("shared_session")]

POLICIES = {"first": {}, "second": {"seed": 5, "learner.schedule.lr": 3e-3}}


def fleet(*, whole: bool = False) -> RLExperiment.Config:
    cfg = slow(staleness=1, num_steps=8)
    if not whole:
        low_rank(cfg)
    cfg.trainer.checkpoint.set(save_every=1)
    return cfg.set(policies=POLICIES)


def run_with_ray(
    path: Path, cfg: RLExperiment.Config, roles: list[str], joining: dict[str, dict[str, str]] | None = None
) -> None:
    """Run with every role in a process, and kill these roles one after the other, two updates apart.

    `joining`: policies that join after two updates; the first role is killed when they have made one.
    """
    left, killed, since, wanted = list(roles), dict[str, int](), 0, dict(joining or {})

    def look(step: int) -> None:
        nonlocal since
        if wanted and step >= 2:
            name = next(iter(wanted))
            add_policy(run, name, wanted.pop(name))
        opened.parts += [opened.open(part) for part in opened.new()]
        own = [policy_run(run, name).path for name in joining or {}]
        if not all((one / "metrics.jsonl").exists() and metrics(one) for one in own):
            return
        back = all(len(events(path, "start", role)) > 1 for role in killed)
        if left and back and step >= since + 2:
            role, since = left.pop(0), step
            killed[role] = events(path, "start", role)[-1]["pid"]
            os.kill(killed[role], signal.SIGKILL)

    experiment = cfg.build()
    with RunDirectory.open(path, to_text(cfg)) as run, open_policy_runs(experiment, run) as opened:
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


@pytest.mark.full
@pytest.mark.parametrize("roles", [["controller", "worker-0"], ["trainer", "parameter-server", "verifier"]])
def test_a_policy_that_joins_while_others_train_outlives_every_role_to_the_bit(
    roles: list[str], tmp_path: Path
) -> None:
    """A name that sorts before the others, so that a role that starts again finds them in another order."""
    joining = {"added": {"seed": "9", "num_steps": "6"}}
    run_with_ray(tmp_path / "joined", fleet().set(policy_slots=3), roles, joining)
    assert [row["policy"] for row in events(tmp_path / "joined", "policy_admitted")] == ["added"]
    alone = fleet().set(policies={"added": {"seed": 9, "num_steps": 6}})
    run_with_ray(tmp_path / "alone", alone, [])
    run_with_ray(tmp_path / "unharmed", fleet(), [])
    for name, other in (("added", "alone"), ("first", "unharmed"), ("second", "unharmed")):
        assert_same_outcome(*(tmp_path / folder / "policies" / name for folder in ("joined", other)))
