"""A reference role of one process, and of two: killed or asked to leave, the run has the bits of one without a role."""

import signal
from pathlib import Path
from typing import Any

import jax
import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.training.alignment.reference import FrozenCopy
from rl.experiment import RLExperiment
from rl.fleet.fleet import Fleet, place
from rl.objective.presets import grpo
from rl.runtime.ray.runtime import run_ray
from tests.elsewhere import elsewhere
from tests.rl.runtime.ray.experiments import events, metrics, parameters, run_here, slow
from tests.rl.runtime.ray.test_preemption import Scenario

pytestmark = pytest.mark.timeout(900)

BOTH = ("reference", "reference-1")


def config(num_steps: int, devices: int, **fleet: Any) -> RLExperiment.Config:
    """Return a run that compares with versions 0 and 4, trainer and reference over as many devices."""
    cfg = slow(num_steps=num_steps, workers=1, objective=grpo(kl_coef=0.5), fleet=Fleet.Config(**fleet))
    cfg.trainer.set(reference=FrozenCopy.Config(reset_every=4), mesh={"fsdp": devices})
    return cfg


def alone(path: str, num_steps: int, devices: int) -> str:
    """Run undisturbed in one process whose trainer scores by the reference."""
    jax.config.update("jax_num_cpu_devices", devices)
    return str(run_here(Path(path), config(num_steps, devices)))


def run_with(scenario: Scenario, cfg: RLExperiment.Config) -> list[str]:
    """Run with a reference role; returns the lines printed, except for waits."""
    said: list[str] = []
    with RunDirectory.open(scenario.path, to_text(cfg := place(cfg).cfg)) as run:
        assert run_ray(cfg.build(), run, lambda: False, scenario, said.append) == cfg.num_steps
    assert scenario.acts == [], "all acts were done"
    return [line for line in said if not line.startswith("waiting ")]


def strike(scenario: Scenario, *signals: tuple[str, signal.Signals], names: tuple[str, ...]) -> None:
    """Send signals to processes of the role, each two updates after all have restarted from the one before."""
    since = [0]

    def send(role: str, signum: signal.Signals) -> None:
        since[0] = scenario.step
        scenario.send(role, signum)

    for number, (role, signum) in enumerate(signals, start=1):
        back: Any = lambda number=number: all(scenario.starts(name) == number for name in names)  # noqa: E731
        ready: Any = lambda back=back: scenario.step >= since[0] + 2 and back()  # noqa: E731
        scenario.when(ready, lambda role=role, signum=signum: send(role, signum))


@pytest.mark.full  # in every run tests/chaos kills every role
@pytest.mark.usefixtures("shared_session")
def test_a_role_is_killed_and_asked_to_leave_and_nothing_changes(tmp_path: Path) -> None:
    expected = Path(elsewhere(alone, str(tmp_path / "alone"), 7, 1, timeout=400))
    scenario = Scenario(tmp_path / "run")
    strike(scenario, ("reference", signal.SIGKILL), ("reference", signal.SIGTERM), names=("reference",))
    said = run_with(scenario, config(7, 1, trainer="cpu:1", workers="1 x cpu:1", reference="cpu:1"))
    assert parameters(scenario.path) == parameters(expected) and metrics(scenario.path) == metrics(expected)
    assert [row["target"] for row in events(scenario.path, "died")] == ["reference"]
    assert [row["role"] for row in events(scenario.path, "shutdown")] == ["reference"]
    assert said[0].startswith("reference (pid ") and said[0].endswith("restarting it") and "SIGTERM" in said[1]
    assert len(events(scenario.path, "reference")) >= 7


@pytest.mark.full
@pytest.mark.usefixtures("shared_session")
def test_a_role_over_two_hosts_is_killed_and_restarted_as_one(tmp_path: Path) -> None:
    expected = Path(elsewhere(alone, str(tmp_path / "alone"), 7, 2, timeout=400))
    scenario = Scenario(tmp_path / "run")
    strike(scenario, ("reference-1", signal.SIGKILL), ("reference", signal.SIGKILL), names=BOTH)
    said = run_with(scenario, config(7, 2, trainer="cpu:2", workers="1 x cpu:1", reference="2 x cpu:1"))
    assert parameters(scenario.path) == parameters(expected) and metrics(scenario.path) == metrics(expected)
    assert [line.split(" ")[0] for line in said] == ["reference-1", "reference"]
    assert all(line.endswith("restarting all reference processes") for line in said)
    ended = [(row["target"], row["cause"]) for row in events(scenario.path, "ended")]
    assert ended == [("reference", "reference-1"), ("reference-1", "reference")]
