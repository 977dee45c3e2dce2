"""A trainer of two processes: either may die or shut down; the run continues, and its result has the same bits.

`test_worker_group.py` has the short form of this: a process of each group is killed in one run.
"""

import signal
from pathlib import Path

import pytest

from rl.audit.invariants import check_run
from rl.protocol.timeouts import Timeouts
from rl.training.trainer import PolicyTrainer
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, slow
from tests.rl.runtime.ray.test_preemption import Scenario, run_with

BOTH = ("trainer", "trainer-1")


def two() -> PolicyTrainer.Config:
    """Return a trainer of two processes, each with two devices of a mesh of four."""
    return slow().trainer.clone(processes=2, mesh={"fsdp": 4})


class Ordeal(Scenario):
    """Signals to the trainer's processes, each two updates after both have restarted from the one before."""

    def __init__(self, path: Path, *signals: tuple[str, signal.Signals], after: int = 3):
        super().__init__(path)
        self._since = after - 2
        for number, (role, signum) in enumerate(signals, start=1):
            ready = lambda number=number: self._calm() and all(self.starts(name) == number for name in BOTH)  # noqa: E731
            self.when(ready, lambda role=role, signum=signum: self._strike(role, signum))

    def _calm(self) -> bool:
        return self.step >= self._since + 2

    def _strike(self, role: str, signum: signal.Signals) -> None:
        self._since = self.step
        self.send(role, signum)


def assert_sound(path: Path) -> None:
    """Check every invariant; one of them is that repeated versions have the same bits."""
    assert [line for finding in check_run(path) for line in finding.broken] == []


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("shared_session")
def test_each_is_killed_and_asked_to_leave_and_the_result_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    calm = Scenario(tmp_path / "calm")
    calm.path.mkdir()
    assert run_with(calm, num_steps=14, workers=1, trainer=two()) == []

    ordeal = ("trainer-1", signal.SIGKILL), ("trainer", signal.SIGKILL), ("trainer-1", signal.SIGTERM)
    scenario = Ordeal(tmp_path / "run", *ordeal, ("trainer", signal.SIGTERM))
    scenario.path.mkdir()
    said = run_with(scenario, num_steps=14, workers=1, trainer=two())
    assert_same_outcome(scenario.path, calm.path)
    assert_sound(scenario.path)
    died = [row["target"] for row in events(scenario.path, "died")]
    assert died == ["trainer-1", "trainer"], "the deaths of processes killed with them are not reported"
    ended = [(row["target"], row["cause"]) for row in events(scenario.path, "ended")]
    assert ended == [("trainer", "trainer-1"), ("trainer-1", "trainer")] * 2
    left = list(events(scenario.path, "shutdown"))
    assert [row["role"] for row in left] == ["trainer-1", "trainer"]
    assert all("abandoned" not in row and row["seconds"] < 25 for row in left)
    assert [line.split(" ")[0] for line in said] == ["trainer-1", "trainer", "trainer-1", "trainer"]
    assert [" died at update " in line for line in said] == [True, True, False, False]
    for row in left:  # it had saved with the others: no update after it was made twice
        done = events(scenario.path, "update")
        assert [update["step"] for update in done if update["time"] > row["time"]][0] == row["step"]


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("shared_session")
def test_others_die_and_one_of_them_is_silent(tmp_path: Path) -> None:
    """Both take part when the parameter server or the controller has to get the state of the trainer again."""
    scenario = Scenario(tmp_path)
    since = [1]

    def strike(role: str, signum: signal.Signals) -> None:
        since[0] = scenario.step
        scenario.send(role, signum)

    roles = ("parameter-server", "controller", "parameter-server", "trainer-1")
    for number, role in enumerate(roles):
        signum = signal.SIGSTOP if role == "trainer-1" else signal.SIGKILL
        back = lambda number=number: all(scenario.starts(r) == 1 + roles[:number].count(r) for r in roles[:number])  # noqa: E731
        calm = lambda back=back: back() and scenario.step >= since[0] + 2  # noqa: E731
        scenario.when(calm, lambda role=role, signum=signum: strike(role, signum))
    timeouts = Timeouts.Config(unresponsive=20.0, warn_after=5.0)
    said = run_with(scenario, num_steps=13, workers=1, trainer=two(), timeouts=timeouts)
    assert events(tmp_path, "republish")
    assert "trainer-1" in {row["target"] for row in events(tmp_path, "unresponsive")}
    assert any(line.startswith("trainer-1 has not answered for ") for line in said)
    assert all(scenario.starts(name) >= 2 for name in BOTH)
    assert_sound(tmp_path)
