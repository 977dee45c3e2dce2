"""Slices of a generation of TPUs that neither Ray nor our table knows, by labels of their machines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh import UserError
from rl.fleet.fleet import Fleet, place
from rl.fleet.requests import RoleRequest, role_requests
from rl.runtime.ray.devices.capacity import POD_TYPE, ROLE, SHAPE, SLICE, WORKER_ID, described_slices
from tests.rl.runtime.ray.machines import Machine, machines
from tests.rl.runtime.ray.test_placement import Reserved
from tests.rl.tiny import tiny_experiment

KIND = "v9x[memory=64;host=4]"
# Name of the slice, number of the host, kind, shape.
HOSTS = [
    ("first", 0, "v9x-8", "2x2x2"),
    ("first", 1, "v9x-8", "2x2x2"),
    ("second", 0, "v9x-8", "2x2x2"),
    ("second", 1, "v9x-8", "2x2x2"),
    ("alone", 0, "v9x-4", "2x2x1"),
    ("other", 0, "v5p-8", "2x2x1"),
]


def request(workers: str) -> RoleRequest:
    cfg = place(tiny_experiment(fleet=Fleet.Config(trainer="cpu:1", workers=workers))).cfg
    return role_requests(cfg, ())["worker"]


def test_a_slice_counts_when_all_its_hosts_are_there_and_no_other_role_has_it():
    def node(name: str, index: int, **more: Any) -> dict[str, Any]:
        labels = {SLICE: name, WORKER_ID: str(index), SHAPE: "2x2x2", POD_TYPE: "v9x-8", **more.pop("labels", {})}
        return {"Alive": True, "Resources": {"TPU": 4.0}, "Labels": labels, **more}

    wanted = request(f"2 x {KIND}:2x2x2")
    nodes = [
        *(node("whole", index) for index in (0, 1)),
        node("half", 0),
        *(node("dead", index, Alive=index == 0) for index in (0, 1)),
        *(node("trainers", index, labels={ROLE: "trainer"}) for index in (0, 1)),
        *(node("workers", index, labels={ROLE: "worker"}) for index in (0, 1)),
        *(node("known", index, labels={POD_TYPE: "v5p-16"}) for index in (0, 1)),
        *(node("long", index, labels={SHAPE: "2x2x4"}) for index in (0, 1)),
        *(node("small", index, Resources={"TPU": 1.0}) for index in (0, 1)),
    ]
    assert described_slices(wanted, nodes) == ["whole", "workers"]


@pytest.fixture(scope="module")
def cluster(warm_interpreter: dict[str, str]) -> Iterator[Any]:
    """Two slices of two hosts, one of one host, and a host of a generation that is known."""
    others: list[Machine] = []
    for name, worker, kind, shape in HOSTS:
        variables = {"TPU_NAME": name, "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": kind}
        others.append(({"resources": {"TPU": 4}}, {**variables, "TPU_TOPOLOGY": shape}))
    with machines({"num_gpus": 1}, others, warm_interpreter) as made:
        yield made


@pytest.mark.full
def test_its_slices_and_machines_are_reserved_by_their_labels(cluster: Any, tmp_path: Path):
    with Reserved(f"{KIND}:2x2x2", f"1 x {KIND}:2x2x2", tmp_path) as reserved:
        seen = reserved.seen()
    roles = [[seen[name] for name in names] for names in (("trainer", "trainer-1"), ("worker-0", "worker-0-1"))]
    for hosts in roles:
        assert [one["TPU_WORKER_ID"] for one in hosts] == ["0", "1"] and len({one["TPU_NAME"] for one in hosts}) == 1
    assert {hosts[0]["TPU_NAME"] for hosts in roles} == {"first", "second"}
    with Reserved("v5p:2x2x1", f"1 x {KIND}:2x2x1", tmp_path) as reserved:
        seen = reserved.seen()
    assert (seen["trainer"]["TPU_NAME"], seen["worker-0"]["TPU_NAME"] != "other") == ("other", True)
    with pytest.raises(UserError, match="the fleet needs 3 slices v9x:2x2x2: .*; the Ray cluster has 2"):
        Reserved(f"{KIND}:2x2x2", f"2 x {KIND}:2x2x2", tmp_path)
