"""The driver and a raylet are killed: roles outlive the one, and those of the other raylet the other."""

from pathlib import Path
from typing import Any

import pytest
import ray

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.runtime.role_process import RoleProcess
from rl.runtime.simulated.failures import Failure, Faults
from tests.rl.runtime.ray.command import Command
from tests.rl.runtime.ray.experiments import assert_same_outcome, events
from tests.rl.tiny import tiny_experiment

TRACE = "time,target\n1,driver\n5,trainer\n9,driver\n12,worker-0\n16,raylet\n24,raylet\n"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_trace_kills_drivers_roles_and_ray_and_the_bits_are_the_same(tmp_path: Path, baseline) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    run = tmp_path / "run"
    with Command(run, "preempted", "--trace", str(tmp_path / "trace.csv")) as command:
        assert command.wait(600) == 0
        assert command.left() == [], "no process is left"
        said = command.output()
    killed = [row for row in events(run, "kill") if row["role"] == "chaos"]
    assert [row["target"] for row in killed] == ["driver", "trainer", "driver", "worker-0", *["raylet"] * 2]
    first, second = (row["time"] for row in killed[::2][:2])
    started = [row for row in events(run, "start") if first <= row["time"] < second]
    assert {row["role"] for row in started} <= {"trainer", "trainer-spare-0"}, "roles outlive their driver"
    sessions = [row["pid"] for row in events(run, "session")]
    assert [killed[n]["pid"] for n in (0, 2)] == sessions[:2]
    assert len(set(sessions)) == len(sessions) >= 3, "one that has lost its raylet is followed by another"
    assert [row["event"] for row in events(run, "died") if row.get("target", "").startswith("raylet-")] == ["died"] * 2
    assert said.count("the roles work on, and another follows") == 2
    assert said.count("Ray's raylet-") == 2 and "6 kills" in said and "from the last checkpoint" not in said
    assert_same_outcome(run, baseline(80))


@pytest.mark.usefixtures("shared_session")
def test_a_driver_that_was_replaced_starts_no_loop(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, to_text(tiny_experiment())) as run:
        at = {"run_path": str(run.path), "token": "t", "grace": 1.0, "namespace": "n"}
        actor: Any = ray.remote(RoleProcess).remote(kind="worker", name="worker-0", **at)
        found: Any = ray.get(actor.report.remote(2))
        assert (found.name, found.runs, found.prepared_as) == ("worker-0", False, "")
        with pytest.raises(UserError, match="worker-0: driver number 1 was replaced by number 2"):
            ray.get(actor.run.remote({}, "", "worker-0", 0, 1))
        found = ray.get(actor.report.remote(2))
        assert not found.runs
        ray.kill(actor)


def test_a_trace_of_what_does_not_outlive_the_driver_is_refused() -> None:
    faults = Faults(None, [Failure(3.0, "driver")])
    faults.check(1, kept=True)
    with pytest.raises(UserError, match="'driver' at 3 s: expected roles that are processes of this machine alone"):
        faults.check(1)
