"""Roles that get SIGTERM, are stopped for a while, or get company: the same bits as undisturbed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from rl.protocol.timeouts import Timeouts
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.runtime.ray.runtime import run_ray
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, run_here, slow
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.timeout(900)  # half a dozen processes each: a busy machine needs long


class Scenario:
    """Actions on a run, one after the other, each as soon as its condition holds."""

    def __init__(self, path: Path):
        self.path = path
        self.acts: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
        self.step = 0
        self.processes: dict[str, psutil.Process] = {}

    def when(self, condition: Callable[[], Any], act: Callable[[], Any]) -> "Scenario":
        self.acts.append((condition, act))
        return self

    def __call__(self, step: int) -> None:
        self.step = step
        if self.acts and self.acts[0][0]():
            self.acts.pop(0)[1]()

    def send(self, role: str, signum: signal.Signals) -> None:
        """Send a signal to the current process of a role."""
        pid = events(self.path, "start", role)[-1]["pid"]
        self.processes.setdefault(f"{role} {pid}", psutil.Process(pid))
        os.kill(pid, signum)

    def starts(self, role: str) -> int:
        return len(events(self.path, "start", role))

    def seen(self, event: str, role: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        return [row for row in events(self.path, event, role) if fields.items() <= row.items()]


def run_with(scenario: Scenario, **changes: Any) -> list[str]:
    """Run the slow experiment with every role in a process; returns the lines printed, except for waits."""
    cfg = slow(**changes)
    said: list[str] = []
    with RunDirectory.open(scenario.path, to_text(cfg)) as run:
        assert run_ray(cfg.build(), run, lambda: False, scenario, said.append) == cfg.num_steps
    assert scenario.acts == [], "all acts were done"
    return [line for line in said if not line.startswith("waiting ")]


STEPWISE = RolloutEngine.Config(max_num_seqs=4, steps_per_dispatch=1)  # so that a lease takes several steps


@pytest.mark.full  # tests/chaos asks a worker and the trainer to leave in every run
@pytest.mark.usefixtures("shared_session")
@pytest.mark.parametrize("roles", [["worker-0", "trainer"], ["controller", "parameter-server", "verifier"]])
def test_sigterm_is_no_crash(roles: list[str], tmp_path: Path, baseline) -> None:
    scenario = Scenario(tmp_path)
    for number, role in enumerate(roles):
        back = lambda number=number: all(scenario.starts(role) == 2 for role in roles[:number])  # noqa: E731
        ready = lambda number=number, back=back: back() and scenario.step >= 2 + 2 * number  # noqa: E731
        scenario.when(ready, lambda role=role: scenario.send(role, signal.SIGTERM))
    steps = 4 + 2 * len(roles)
    said = run_with(scenario, num_steps=steps, workers=1, engine=STEPWISE)
    assert_same_outcome(tmp_path, baseline(steps))
    assert [scenario.starts(role) for role in roles] == [2] * len(roles)
    leaves = {row["role"]: row for row in events(tmp_path, "shutdown")}
    assert sorted(leaves) == sorted(roles)
    assert all(row["seconds"] < 25 and "abandoned" not in row for row in leaves.values())
    loops = [role for role in roles if role in ("worker-0", "trainer")]  # whose shutdown the driver reports
    assert [line.split(" ")[0] for line in said] == loops
    assert all("shut down on SIGTERM; restarting it" in line for line in said)
    assert [row for row in events(tmp_path, "died") if row["target"] in loops] == []
    if "trainer" in roles:
        updates = [row["step"] for row in events(tmp_path, "update")]
        assert updates == list(range(steps)), "the trainer saved: no update was repeated"
        assert leaves["trainer"]["step"] in updates


@pytest.mark.full
@pytest.mark.usefixtures("shared_session")
def test_pages_of_a_worker_that_leaves_go_to_the_next(tmp_path: Path) -> None:
    """A lease takes some hundred steps of four rows, in which SIGTERM comes."""
    engine = STEPWISE.clone(page_size=4, tiers=HostTiers.Config())
    changes: dict[str, Any] = {"num_steps": 6, "workers": 2, "max_new_tokens": 64, "engine": engine}
    expected = run_here(tmp_path / "expected", tiny_experiment(evaluation=None, **changes))
    scenario = Scenario(tmp_path / "run")
    scenario.when(lambda: scenario.step >= 2, lambda: scenario.send("worker-0", signal.SIGTERM))
    scenario.when(lambda: scenario.starts("worker-0") == 2, lambda: None)
    run_with(scenario, **changes)
    assert_same_outcome(tmp_path / "run", expected)
    [left] = events(tmp_path / "run", "pages_left")
    taken = events(tmp_path / "run", "pages_taken")
    assert left["role"] == "worker-0" and left["sequences"] > 0 and left["nbytes"] > 0
    assert 0 < sum(row["nbytes"] for row in taken) <= left["nbytes"] and sum(row["pages"] for row in taken) > 0
    assert [row["damaged"] for row in taken] == [0] * len(taken)


@pytest.mark.usefixtures("shared_session")
@pytest.mark.full
def test_a_stopped_worker_loses_its_lease_and_continues_later(tmp_path: Path, baseline) -> None:
    scenario = Scenario(tmp_path)
    scenario.when(
        lambda: scenario.step >= 2 and len(scenario.seen("pull", "worker-1")) >= 2,
        lambda: scenario.send("worker-1", signal.SIGSTOP),
    )
    scenario.when(
        lambda: scenario.seen("lease_expired", worker="worker-1", reason="expired"),
        lambda: scenario.send("worker-1", signal.SIGCONT),
    )
    cfg = slow(num_steps=12, controller=slow().controller.clone(lease_seconds=3.0))
    said = run_with(scenario, num_steps=12, controller=cfg.controller)
    assert_same_outcome(tmp_path, baseline(12))
    [lost] = scenario.seen("lease_expired", worker="worker-1", reason="expired")
    assert scenario.starts("worker-1") == 1 and said == []
    assert [row for row in scenario.seen("score", "worker-1") if row["time"] > lost["time"]], "it continued"


@pytest.mark.usefixtures("shared_session")
@pytest.mark.full
@pytest.mark.parametrize("role", ["parameter-server", "controller", "verifier"])
def test_a_role_stopped_for_a_while_is_waited_for_by_name(role: str, tmp_path: Path, baseline) -> None:
    scenario = Scenario(tmp_path)
    scenario.when(lambda: scenario.step >= 2, lambda: scenario.send(role, signal.SIGSTOP))

    def who_waits() -> set[str]:
        rows = [row for row in scenario.seen("waiting") if role in row["what"]]
        return {row["who"] for row in rows if row["who"] != "driver" or "answer" in row["what"]}

    # The driver, and somebody who has called it: each by a clock of its own.
    scenario.when(
        lambda: "driver" in (waits := who_waits()) and len(waits) > 1, lambda: scenario.send(role, signal.SIGCONT)
    )
    said = run_with(scenario, num_steps=6, timeouts=Timeouts.Config(warn_after=3.0))
    assert_same_outcome(tmp_path, baseline(6))
    assert scenario.starts(role) == 1 and said == []
    assert len(who_waits()) > 1


@pytest.mark.usefixtures("shared_session")
@pytest.mark.full
@pytest.mark.parametrize("roles", [["controller"], ["parameter-server", "verifier", "trainer", "worker-0"]])
def test_roles_stopped_for_good_are_killed_and_started_again(roles: list[str], tmp_path: Path, baseline) -> None:
    scenario = Scenario(tmp_path)
    for number, role in enumerate(roles):
        back = lambda number=number: all(scenario.starts(role) == 2 for role in roles[:number])  # noqa: E731
        ready = lambda number=number, back=back: back() and scenario.step >= 2 + 2 * number  # noqa: E731
        scenario.when(ready, lambda role=role: scenario.send(role, signal.SIGSTOP))
    steps, timeouts = 4 + 2 * len(roles), Timeouts.Config(unresponsive=20.0, warn_after=5.0)
    said = run_with(scenario, num_steps=steps, workers=1, timeouts=timeouts)  # another worker could do without it
    assert_same_outcome(tmp_path, baseline(steps))
    assert all(scenario.starts(role) >= 2 for role in roles)  # on a busy machine others may be slow to answer, too
    assert {row["target"] for row in events(tmp_path, "unresponsive")} >= set(roles)
    assert {line.split(" ")[0] for line in said if "has not answered for" in line} >= set(roles)
    give_up = time.monotonic() + 30
    while any(process.is_running() for process in scenario.processes.values()):
        assert time.monotonic() < give_up, "the stopped processes are gone"
        time.sleep(0.1)


@pytest.mark.usefixtures("shared_session")
@pytest.mark.full
def test_three_workers_give_the_same_as_one(tmp_path: Path, baseline) -> None:
    for workers in (1, 3):
        scenario = Scenario(tmp_path / str(workers))
        scenario.path.mkdir()
        run_with(scenario, num_steps=6, workers=workers, groups_per_lease=1)
        assert_same_outcome(scenario.path, baseline(6))
        worked = {row["role"] for row in scenario.seen("score")}
        assert worked == {f"worker-{i}" for i in range(workers)}
        assert {row["role"] for row in scenario.seen("joined")} == worked
