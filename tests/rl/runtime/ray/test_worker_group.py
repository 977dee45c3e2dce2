"""A worker of two processes: either may die or leave, and the run has the bits of an undisturbed one in one process.

So has a trainer of two processes beside it.
"""

import signal
from pathlib import Path
from typing import Any

import jax
import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from rl.audit.invariants import check_run
from rl.experiment import RLExperiment
from rl.fleet.fleet import Fleet, place
from rl.rollout.engine import RolloutEngine
from rl.runtime.ray.runtime import run_ray
from rl.training.trainer import PolicyTrainer
from tests.elsewhere import elsewhere
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, metrics, parameters, run_here, slow
from tests.rl.runtime.ray.test_preemption import Scenario

pytestmark = pytest.mark.timeout(900)

BOTH = ("worker-0", "worker-0-1")
TRAINERS = ("trainer", "trainer-1")
ENGINE = RolloutEngine.Config(max_num_seqs=4, steps_per_dispatch=1, mesh={"tensor": 2})


def config(num_steps: int, **changes: Any) -> RLExperiment.Config:
    return slow(num_steps=num_steps, engine=ENGINE, **changes)


def sharded_trainer(processes: int) -> PolicyTrainer.Config:
    """Return a trainer over two devices. The sum of two terms has the same bits in whichever processes they are."""
    return slow().trainer.clone(mesh={"fsdp": 2}, processes=processes)


def alone(path: str, num_steps: int, sharded: bool) -> str:
    """Run undisturbed in one process with as many devices as the two processes of a role have."""
    jax.config.update("jax_num_cpu_devices", 2)
    changes = {"trainer": sharded_trainer(1)} if sharded else {}
    return str(run_here(Path(path), config(num_steps, **changes)))


def undisturbed(path: Path, num_steps: int, sharded: bool = False) -> Path:
    path.mkdir()
    return Path(elsewhere(alone, str(path), num_steps, sharded, timeout=400))


def run_with(scenario: Scenario, cfg: RLExperiment.Config) -> list[str]:
    """Run with a worker of two processes; returns the lines printed, except for waits."""
    cfg = place(cfg.set(fleet=Fleet.Config(workers="1 x 2 x cpu:1"))).cfg
    said: list[str] = []
    with RunDirectory.open(scenario.path, to_text(cfg)) as run:
        assert run_ray(cfg.build(), run, lambda: False, scenario, said.append) == cfg.num_steps
    assert scenario.acts == [], "all acts were done"
    return [line for line in said if not line.startswith("waiting ")]


def strikes(path: Path, *signals: tuple[str, signal.Signals]) -> Scenario:
    """Send signals to a role's processes, each two updates after all have restarted from the one before."""
    scenario, since, groups = Scenario(path), [0], (BOTH, TRAINERS)
    struck = [next(group for group in groups if role in group) for role, _ in signals]

    def strike(role: str, signum: signal.Signals) -> None:
        since[0] = scenario.step
        scenario.send(role, signum)

    for number, (role, signum) in enumerate(signals):
        starts = {name: 1 + struck[:number].count(group) for group in set(struck) for name in group}
        back = lambda starts=starts: all(scenario.starts(name) == n for name, n in starts.items())  # noqa: E731
        ready = lambda back=back: scenario.step >= since[0] + 2 and back()  # noqa: E731
        scenario.when(ready, lambda role=role, signum=signum: strike(role, signum))
    return scenario


def assert_sound(path: Path) -> None:
    assert [line for finding in check_run(path) for line in finding.broken] == []


@pytest.mark.full  # in every run tests/chaos kills every role
@pytest.mark.usefixtures("shared_session")
def test_a_process_of_each_role_is_killed_and_the_result_is_that_of_one_undisturbed_process(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "alone", 6, sharded=True)
    scenario = strikes(tmp_path / "run", ("worker-0-1", signal.SIGKILL), ("trainer-1", signal.SIGKILL))
    said = run_with(scenario, config(6, trainer=sharded_trainer(2)))
    assert parameters(scenario.path) == parameters(expected)
    for ours, whole in zip(metrics(scenario.path), metrics(expected), strict=True):
        means = {name: whole.pop(name) for name in ("logprob_diff_mean", "scoring_diff_mean")}  # added up by process
        assert {name: ours.pop(name) for name in means} == pytest.approx(means, rel=1e-6)
        assert ours == whole
    for line, role, group in zip(said, ("worker-0-1", "trainer-1"), ("worker-0", "trainer"), strict=True):
        assert line.startswith(f"{role} (pid ") and line.endswith(f"; restarting all {group} processes")
    assert [row["target"] for row in events(scenario.path, "died")] == ["worker-0-1", "trainer-1"]
    ended = [(row["target"], row["cause"]) for row in events(scenario.path, "ended")]
    assert ended == [("worker-0", "worker-0-1"), ("trainer", "trainer-1")]
    assert [scenario.starts(name) for name in (*BOTH, *TRAINERS)] == [2, 2, 2, 2]
    assert {row["role"] for row in events(scenario.path, "push")} == set(TRAINERS)
    assert_sound(scenario.path)


@pytest.mark.full
@pytest.mark.usefixtures("shared_session")
def test_each_is_killed_and_nothing_changes(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "alone", 9)
    ordeal = (("worker-0", signal.SIGKILL), ("worker-0-1", signal.SIGKILL), ("worker-0", signal.SIGKILL))
    scenario = strikes(tmp_path / "run", *ordeal)
    said = run_with(scenario, config(9))
    assert_same_outcome(scenario.path, expected)
    assert_sound(scenario.path)
    assert [line.split(" ")[0] for line in said] == ["worker-0", "worker-0-1", "worker-0"]
    assert [row["target"] for row in events(scenario.path, "died")] == ["worker-0", "worker-0-1", "worker-0"]
    lost = events(scenario.path, "lease_expired")
    assert {(row["worker"], row["reason"]) for row in lost} == {("worker-0", "worker died")}


@pytest.mark.full
@pytest.mark.usefixtures("shared_session")
def test_each_is_asked_to_leave_and_the_lease_is_handed_back(tmp_path: Path) -> None:
    """Over several devices, what is continued has the same bits as what is drawn at once up to rounding only."""
    scenario = strikes(tmp_path, ("worker-0-1", signal.SIGTERM), ("worker-0", signal.SIGTERM))
    said = run_with(scenario, config(8))
    assert_sound(tmp_path)
    assert [line.split(" ")[0] for line in said] == ["worker-0-1", "worker-0"]
    assert all(line.endswith("shut down on SIGTERM; restarting all worker-0 processes") for line in said)
    left = events(tmp_path, "shutdown")
    assert [row["role"] for row in left] == ["worker-0-1", "worker-0"]
    assert all("abandoned" not in row and row["seconds"] < 25 for row in left)
    assert not events(tmp_path, "died") and not events(tmp_path, "lease_expired")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.usefixtures("shared_session")
def test_newer_weights_come_in_flight_to_both(tmp_path: Path) -> None:
    """Versions within a sequence depend on time, so there is no other run to compare with."""
    cfg = config(6, staleness=1, controller=slow().controller.clone(weights="in_flight"))
    scenario = Scenario(tmp_path / "run")
    assert run_with(scenario, cfg) == []
    assert_sound(scenario.path)
    swaps = events(scenario.path, "swap", "worker-0")
    assert {row["version"] for row in swaps} >= {0, 3}
