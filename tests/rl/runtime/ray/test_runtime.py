"""Roles as processes: the same result as in one process, for any role that is killed."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.ray.runtime import run_ray
from rl.runtime.simulated.failures import Faults
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, metrics, slow
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.timeout(900)  # half a dozen processes each: a busy machine needs long


def run_with_ray(
    path: Path, cfg: RLExperiment.Config, look: Callable[[int], None] = lambda step: None, *, kill_at: int | None = None
) -> tuple[Path, list[str]]:
    """Run with every role in a process; `look` is called all the time.

    Returns the lines printed too, except for waits: on a busy machine there are some.
    """
    said: list[str] = []
    with RunDirectory.open(path, to_text(cfg)) as run:
        steps = run_ray(cfg.build(), run, lambda: False, look, said.append, faults=Faults(kill_at))
        assert steps == cfg.num_steps
    return path, [line for line in said if not line.startswith("waiting ")]


@pytest.mark.full  # tests/chaos has two workers in every run
@pytest.mark.usefixtures("shared_session")
def test_two_workers_give_the_same_as_one_process_and_a_signal_to_one_records_a_profile(tmp_path, baseline) -> None:
    """SIGUSR1 to a worker, which would end it by default, makes the trainer record a profile."""
    signalled: list[int] = []

    def look(step: int) -> None:
        workers = [row["pid"] for row in events(tmp_path, "start") if row["role"].startswith("worker-")]
        if workers and not signalled:
            signalled.append(workers[0])
            os.kill(workers[0], signal.SIGUSR1)

    path, said = run_with_ray(tmp_path, slow(num_steps=4), look)
    assert_same_outcome(path, baseline(4))
    assert said == []
    assert len(events(tmp_path, "profile", "trainer")) == 1


@pytest.mark.full  # as test_run.py and tests/chaos kill a worker in every run
@pytest.mark.usefixtures("shared_session")
def test_the_only_worker_is_killed_and_replaced(tmp_path, baseline) -> None:
    path, said = run_with_ray(tmp_path, slow(num_steps=6, workers=1), kill_at=3)
    assert_same_outcome(path, baseline(6))
    assert [row["step"] for row in events(path, "update")] == [0, 1, 2, 3, 4, 5]
    [kill] = events(path, "kill")
    pids = [row["pid"] for row in events(path, "start", "worker-0")]
    assert pids[0] == kill["pid"] and len(pids) == 2
    after = [row for row in events(path, "score", "worker-0") if row["time"] > kill["time"]]
    assert after, "its successor generated"
    [line] = said
    assert line.startswith(f"killed worker-0 (pid {kill['pid']}) at update {kill['step']}; replaced after ")


@pytest.mark.usefixtures("shared_session")
@pytest.mark.full
def test_one_of_two_workers_is_killed_with_a_lease_in_hand(tmp_path, baseline) -> None:
    path, said = run_with_ray(tmp_path, slow(num_steps=12), kill_at=6)
    assert_same_outcome(path, baseline(12))
    assert [row["step"] for row in events(path, "update")] == list(range(12))
    assert len(said) == 1 and said[0].startswith("killed worker-1")


class Assassin:
    """A kill of one role after the other, each when the one before has restarted and two more updates are done."""

    def __init__(self, path: Path, roles: list[str]):
        self.path, self.roles, self.killed = path, list(roles), dict[str, int]()
        self.since = 0

    def __call__(self, step: int) -> None:
        back = all(self.starts(role) > 1 for role in self.killed)
        if not self.roles or not back or step < self.since + 2:
            return
        role = self.roles.pop(0)
        self.killed[role] = events(self.path, "start", role)[-1]["pid"]
        self.since = step
        os.kill(self.killed[role], signal.SIGKILL)

    def starts(self, role: str) -> int:
        return len(events(self.path, "start", role))


@pytest.mark.usefixtures("shared_session")
@pytest.mark.full  # of kills of every role, tests/chaos/test_schedule.py has the short proof
@pytest.mark.parametrize("staleness", [0, 1])
def test_server_controller_verifier_and_trainer_are_killed_one_after_the_other(
    staleness: int, tmp_path, baseline
) -> None:
    roles = ["parameter-server", "controller", "verifier", "trainer"]
    assassin = Assassin(tmp_path, roles)
    path, said = run_with_ray(tmp_path, slow(num_steps=16, staleness=staleness, workers=1), assassin)
    assert list(assassin.killed) == roles
    assert [assassin.starts(role) for role in roles] == [2, 2, 2, 2]
    assert_same_outcome(path, baseline(16, staleness))
    assert events(path, "republish")
    [line] = said
    assert line.startswith(f"trainer (pid {assassin.killed['trainer']}) died at update ")


@pytest.mark.usefixtures("shared_session")
@pytest.mark.full
def test_shards_of_the_parameter_server_are_killed_and_filled_again(tmp_path, baseline) -> None:
    """Weights go over sockets, by deltas, from three processes to workers that serve each other."""
    cfg = slow(num_steps=32, workers=3, groups_per_lease=1)
    cfg.parameter_server.set(shard_servers=3, shared_memory=False, codec="delta")
    roles = ["parameter-server-1", "worker-0", "parameter-server-2", "parameter-server"]
    assassin = Assassin(tmp_path, roles)
    path, _ = run_with_ray(tmp_path, cfg, assassin)
    assert list(assassin.killed) == roles
    assert_same_outcome(path, baseline(32))
    assert {row["source"] for row in events(path, "pull") if "source" in row} == {"server", "worker"}


@pytest.mark.usefixtures("shared_session")
def test_an_error_in_an_actor_is_the_message_itself(tmp_path) -> None:
    cfg = tiny_experiment(workers=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cfg.parameter_server.set(port=taken.getsockname()[1])
        with RunDirectory.open(tmp_path, to_text(cfg)) as run, pytest.raises(UserError) as error:
            run_ray(cfg.build(), run, lambda: False, lambda step: None)
    assert type(error.value) is UserError
    assert str(error.value).startswith(f"parameter server cannot listen on 127.0.0.1:{cfg.parameter_server.port}: ")
    assert metrics(tmp_path) == []
