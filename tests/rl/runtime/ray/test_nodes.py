"""A Ray cluster of several nodes on this machine, each with a loopback address of its own, and the loss of one."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from rl.runtime.ray.runtime import run_ray
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, run_here, slow
from tests.rl.tiny import tiny_experiment

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

QUICK = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Three nodes; the driver is on the first."""
    import ray  # after rl.runtime.ray has set loopback for its sockets
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "_system_config": QUICK}
    made = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    try:
        for number in (2, 3):
            made.add_node(num_cpus=1, node_ip_address=f"127.0.0.{number}")
        ray.init(made.address, log_to_driver=False, _node_ip_address="127.0.0.1")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def raylet_of(pid: int) -> int:
    """Return the process of the node on which an actor runs."""
    parent = psutil.Process(pid).parent()
    assert parent is not None and parent.name() == "raylet"
    return parent.pid


def test_a_node_is_lost_with_all_its_processes_and_the_roles_come_back_on_others(tmp_path: Path, cluster: Any) -> None:
    expected = run_here(tmp_path / "expected", tiny_experiment(num_steps=16, evaluation=None))
    path, cfg = tmp_path / "run", slow(num_steps=16, workers=3, groups_per_lease=1)
    head = cluster.head_node.all_processes["raylet"][0].process.pid
    lost: dict[str, int] = {}
    nodes: set[int] = set()
    when: list[float] = []

    def look(step: int) -> None:
        homes = {row["role"]: row["pid"] for row in events(path, "start")}
        workers = {role: pid for role, pid in homes.items() if role.startswith("worker-")}
        if lost or step < 3 or len(workers) < 3:
            return
        nodes.update(raylet_of(pid) for pid in workers.values())
        victim = next(raylet_of(pid) for pid in workers.values() if raylet_of(pid) != head)
        lost.update({role: pid for role, pid in homes.items() if raylet_of(pid) == victim})
        processes = [psutil.Process(victim), *psutil.Process(victim).children(recursive=True)]
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        when.append(time.time())

    said: list[str] = []
    with RunDirectory.open(path, to_text(cfg)) as run:
        assert run_ray(cfg.build(), run, lambda: False, look, said.append) == 16
    assert len(nodes) > 1, "workers were spread"
    assert any(role.startswith("worker-") for role in lost)
    assert_same_outcome(path, expected)
    later = [row for row in events(path, "start") if row["time"] > when[0]]
    started = {row["role"] for row in later}
    assert {role for role in lost if not role.startswith("worker-")} <= started, said
