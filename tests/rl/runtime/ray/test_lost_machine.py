"""The machine of a launched worker is lost: its place waits for a machine of its name, and the head does nothing."""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from axlearn_like.run.events import EventLog
from rl.fleet.fleet import Fleet, place
from rl.fleet.requests import role_requests
from rl.protocol.timeouts import Timeouts
from rl.runtime.ray.devices.capacity import NAME, ROLE, own_machine
from rl.runtime.ray.devices.reservation import DeviceWait, Reservation
from tests.rl.tiny import tiny_experiment

MACHINES = (("trainer", "run-trainer"), ("worker", "run-worker-0"), ("worker", "run-worker-1"))
NAMES = {"trainer": [["trainer"]], "worker": [["worker-0"], ["worker-1"]]}
_CFG = tiny_experiment(fleet=Fleet.Config(trainer="v6e:1x1", workers="2xv6e:1x1"), workers=2)
REQUESTS = role_requests(place(_CFG).cfg, ())


def labels(role: str, name: str) -> dict[str, str]:
    """Return the labels that a launched run gives to a machine."""
    return {ROLE: role, NAME: name}


def test_instances_have_machines_of_their_own_where_there_are_as_many() -> None:
    nodes = [{"Alive": True, "Labels": labels(role, name)} for role, name in MACHINES]
    worker = REQUESTS["worker"]
    assert [own_machine(worker, number, nodes) for number in (0, 1)] == [{NAME: "run-worker-0"}, {NAME: "run-worker-1"}]
    several = [*nodes, {"Alive": True, "Labels": labels("worker", "run-worker-1")}]  # another host of its slice
    assert own_machine(worker, 1, several) == {NAME: "run-worker-1"}
    nodes[2]["Alive"] = False
    assert own_machine(worker, 0, nodes) == {}
    assert own_machine(worker, 0, [{"Alive": True, "Labels": {}}] * 3) == {}, "a cluster that was not launched by us"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_head_rests_until_the_machine_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GCS would try the other worker's machine again and again without its name, which takes a core."""
    ray, Cluster = importlib.import_module("ray"), importlib.import_module("ray.cluster_utils").Cluster

    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "4")
    for name, value in {"NAME": "one", "WORKER_ID": "0", "ACCELERATOR_TYPE": "v6e-1", "TOPOLOGY": "1x1"}.items():
        monkeypatch.setenv(f"TPU_{name}", value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})

    def add(role: str, name: str) -> Any:
        return cluster.add_node(num_cpus=1, resources={"TPU": 1}, labels=labels(role, name))

    try:
        added = [add(role, name) for role, name in MACHINES]
        ray.init(cluster.address, log_to_driver=False)
        log, timeouts = EventLog(tmp_path / "events.jsonl"), Timeouts.Config(restart=60.0)
        reservation = Reservation.make(REQUESTS, NAMES, DeviceWait(timeouts, print, log, lambda: False))
        slots = {name: reservation.slot(name) for instances in NAMES.values() for (name,) in instances}

        def states() -> dict[str, str]:
            table = importlib.import_module("ray.util").placement_group_table()
            return {name: table[slot.group.id.hex()]["state"] for name, slot in slots.items() if slot is not None}

        cluster.remove_node(added[2], allow_graceful=False)
        _until(lambda: states() == {"trainer": "CREATED", "worker-0": "CREATED", "worker-1": "RESCHEDULING"})
        [gcs] = [one for one in psutil.Process().children(recursive=True) if one.name() == "gcs_server"]
        began = sum(gcs.cpu_times()[:2])
        time.sleep(2.0)
        assert sum(gcs.cpu_times()[:2]) - began < 0.5  # seconds; 0.01 here, and 1.4 and more without the name
        add(*MACHINES[2])
        _until(lambda: set(states().values()) == {"CREATED"})
    finally:
        ray.shutdown()
        cluster.shutdown()


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)
