"""Requests of processes to a scheduler: devices of a host, shares of a GPU, and the machine that all roles share."""

from typing import Any

import pytest

from mesh import UserError
from mesh.mesh import PlaceholderDevice
from rl.fleet.fleet import Fleet, place
from rl.fleet.requests import MEMORY_FRACTION, OLD_MEMORY_FRACTION, role_requests
from tests.rl.tiny import tiny_experiment

CPU = [PlaceholderDevice()]
H200 = PlaceholderDevice("gpu", "NVIDIA H200")


def requests(trainer: str, worker: str, here: Any = CPU, **changes: Any):
    fleet = Fleet.Config(trainer=trainer, workers=worker)
    return role_requests(place(tiny_experiment(fleet=fleet, **changes)).cfg, here)


@pytest.mark.parametrize(
    ("trainer", "kind", "processes", "each", "devices"),
    [
        ("h100:2", "GPU", 1, 2.0, 2),
        ("h100:16", "GPU", 2, 8.0, 8),
        ("2 x h100:4", "GPU", 2, 4.0, 4),
        ("h100:0.25", "GPU", 1, 0.25, 1),
        ("v5p:2x2x2", "TPU", 2, 4.0, 4),
        ("2 x v5p:2x2x2", "TPU", 4, 4.0, 4),
        ("v5e:2x4", "TPU", 1, 8.0, 8),
        ("tpu7x:2x2x1", "TPU", 1, 4.0, 8),  # two devices a chip
        ("2 x cpu:4", "CPU", 2, 0.0, 4),
    ],
)
def test_a_process_asks_for_the_devices_of_its_host(trainer: str, kind: str, processes: int, each: float, devices: int):
    found = requests(trainer, "3 x h200:2")
    one = found["trainer"]
    assert (one.kind, one.processes, one.each, one.devices, one.instances) == (kind, processes, each, devices, 1)
    worker = found["worker"]
    assert (worker.instances, worker.each, worker.model, worker.total) == (3, 2.0, "H200", 6.0)


def test_slices_have_their_hosts_and_gpus_their_model():
    both = requests("2 x v5p:2x2x2", "gpu:1")
    assert (both["trainer"].slices, both["trainer"].hosts_per_slice) == (2, 2)
    assert both["trainer"].model is None and both["worker"].model is None
    assert requests("h100:16", "gpu:1")["trainer"].slices == 1


@pytest.mark.parametrize(
    ("workers", "kind", "instances", "processes", "each"),
    [
        ("64 x v5p:2x2x2", "TPU", 64, 2, 4.0),
        ("2 x h100:16", "GPU", 2, 2, 8.0),
        ("3 x 2 x h100:4", "GPU", 3, 2, 4.0),
        ("1 x 2 x cpu:2", "CPU", 1, 2, 0.0),
    ],
)
def test_a_worker_has_a_process_on_each_of_its_hosts(
    workers: str, kind: str, instances: int, processes: int, each: float
):
    one = requests("h100:1", workers)["worker"]
    assert (one.kind, one.instances, one.processes, one.each) == (kind, instances, processes, each)
    assert Fleet.Config(workers=workers).worker_hosts == processes


def test_processes_of_the_trainer_must_be_its_hosts():
    cfg = place(tiny_experiment(fleet=Fleet.Config(trainer="h100:16", workers="h100:1"))).cfg
    cfg.trainer.processes = 4
    with pytest.raises(UserError, match="trainer.processes=4, and fleet.trainer=h100:16 .* expected 2"):
        role_requests(cfg, CPU)


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 0.9), ({MEMORY_FRACTION: "0.8"}, 0.8), ({OLD_MEMORY_FRACTION: "0.5"}, 0.5)]
)
def test_roles_on_one_gpu_allocate_no_more_than_their_shares(given: dict[str, str], expected: float):
    found = requests("h100:0.5", "2 x h100:0.25")
    shares = [found["trainer"], *[found["worker"]] * 2]
    variables = [one.environment(given) for one in shares]
    assert sum(float(one[MEMORY_FRACTION]) for one in variables) == pytest.approx(expected)
    assert all(one[OLD_MEMORY_FRACTION] == "" for one in variables)  # jax refuses both together


def test_whole_devices_leave_the_environment_as_it_is():
    found = requests("h100:2", "v5e:1x1")
    assert [one.environment({"XLA_FLAGS": "x"}) for one in found.values()] == [{}, {}]


def test_cpus_show_as_many_devices_and_so_does_a_rehearsal_on_cpus():
    found = requests("cpu:2", "v5e:2x2")
    assert found["trainer"].environment({}) == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    rehearsed = found["worker"].environment({"JAX_PLATFORMS": "cpu"})
    assert rehearsed == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}


def test_on_cpus_roles_that_are_here_ask_for_nothing():
    assert requests("here", "here") == {} == requests("here", "here", here=())
    mixed = requests("h100:1", "here")["worker"]
    assert mixed.environment({}) == {"JAX_PLATFORMS": "cpu"}  # its machine's GPUs, if any, are the trainer's


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_roles_share_the_only_gpu_of_a_machine(workers: int):
    found = requests("here", "here", [H200], workers=workers)
    assert found["trainer"].each == 0.5 and found["worker"].instances == workers
    assert 0.499 < found["worker"].total <= 0.5
    assert (found["worker"].each * 10_000).is_integer()  # Ray rounds, and must not round up
    assert requests("here", "here", [H200], workers=0)["trainer"].each == 1.0


@pytest.mark.parametrize(
    ("device", "count", "expected"),
    [
        (H200, 8, "--fleet trainer=h200:4,workers=4xh200:1"),
        (H200, 2, "--fleet trainer=h200:1,workers=1xh200:1"),
        (PlaceholderDevice("gpu", "NVIDIA L4"), 4, "--fleet trainer=gpu:2,workers=2xgpu:1"),
        (PlaceholderDevice("tpu", "TPU v6 lite"), 8, "--fleet trainer=v6e:2x2,workers=4xv6e:1x1"),
        (PlaceholderDevice("tpu", "TPU v5 lite"), 4, "--fleet trainer=v5e:1x1,workers=3xv5e:1x1"),
        (PlaceholderDevice("tpu", "TPU v5p"), 4, "--fleet trainer=v5p:1x1x1,workers=3xv5p:1x1x1"),
        (PlaceholderDevice("tpu", "TPU7x"), 8, "--fleet trainer=tpu7x:1x1x1,workers=3xtpu7x:1x1x1"),
        (PlaceholderDevice("tpu", "TPU v6 lite"), 1, "--runtime inprocess"),
    ],
)
def test_a_machine_that_cannot_be_shared_is_refused_with_a_fleet_for_it(
    device: PlaceholderDevice, count: int, expected: str
):
    with pytest.raises(UserError, match=f"this machine has {count} x {device.device_kind}") as refused:
        requests("here", "here", [device] * count)
    assert expected in str(refused.value)
    if expected.startswith("--fleet"):  # it can be pasted, and takes no more than there is
        fleet = Fleet.Config().edited(expected.removeprefix("--fleet "))
        found = requests(fleet.trainer, fleet.workers)
        assert sum(one.instances * one.processes * one.devices for one in found.values()) <= count


def test_a_reference_asks_for_its_own_devices_whatever_the_others_do():
    cfg = tiny_experiment(fleet=Fleet.Config(reference="2 x h100:2"))
    found = role_requests(cfg, CPU)
    assert list(found) == ["reference"]
    request = found["reference"]
    assert (request.kind, request.processes, request.each, request.devices, request.model) == ("GPU", 2, 2, 2, "H100")
    with pytest.raises(UserError, match=r"fleet\.reference=2 x h100:2: this machine has 1 x .*; expected --fleet"):
        role_requests(cfg, [H200])
    cfg.fleet = Fleet.Config(trainer="h100:1", workers="2 x h100:1", reference="here")
    assert role_requests(cfg, CPU)["reference"].environment({}) == {"JAX_PLATFORMS": "cpu"}


def test_a_role_that_is_here_beside_a_described_one_needs_a_machine_without_accelerators():
    with pytest.raises(UserError, match="fleet.workers=here: this machine has 1 x NVIDIA H200, .*trainer=h200:0.5"):
        requests("h100:1", "here", [H200])
