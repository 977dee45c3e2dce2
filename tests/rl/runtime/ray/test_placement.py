"""Roles on a cluster of machines with GPUs and TPUs, which Ray believes to be there: each process on its own devices.

The TPU nodes say of themselves what Google's machines say, and Ray finds resources and labels from that.
"""

import contextlib
import importlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.experiment import RLExperiment
from rl.fleet.fleet import Fleet, place
from rl.fleet.requests import MEMORY_FRACTION, RoleRequest, role_requests
from rl.protocol.timeouts import Timeouts
from rl.runtime.ray.devices import placement
from rl.runtime.ray.devices.placement import SERVICES
from rl.runtime.ray.devices.reservation import DeviceWait, Reservation, Stopped, refuse_accelerators
from rl.runtime.ray.runtime import run_ray
from rl.runtime.supervision.names import process_groups
from tests.rl.runtime.ray.command import Command
from tests.rl.runtime.ray.experiments import events, metrics, slow
from tests.rl.runtime.ray.machines import Machine, machines
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.timeout(600)

# Name of the slice, number of the host, kind, shape, chips of the host.
TPU_HOSTS = [
    ("first", 0, "v5p-16", "2x2x2", 4),
    ("first", 1, "v5p-16", "2x2x2", 4),
    ("second", 0, "v5p-16", "2x2x2", 4),
    ("second", 1, "v5p-16", "2x2x2", 4),
    ("single", 0, "v6e-8", "2x4", 8),
]
GPUS = "127.0.0.2"  # the first machine after the head


def ray_module() -> Any:
    """Import Ray, after rl.runtime.ray has set loopback for its sockets."""
    return importlib.import_module("ray")


@pytest.mark.parametrize("kind", SERVICES)
def test_a_service_sees_no_accelerator_whatever_the_driver_was_started_with(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert placement._environment(kind, None)["JAX_PLATFORMS"] == "cpu"  # pyright: ignore
    assert placement._environment("trainer", None)["JAX_PLATFORMS"] == "tpu"  # pyright: ignore
    monkeypatch.delenv("JAX_PLATFORMS")
    assert placement._environment(kind, None)["JAX_PLATFORMS"] == "cpu"  # pyright: ignore
    assert "JAX_PLATFORMS" not in placement._environment("worker", None)  # pyright: ignore


@pytest.fixture(scope="module")
def cluster(warm_interpreter: dict[str, str]) -> Iterator[Any]:
    """A head with one A100, where the driver is; a host with four H100, two slices v5p:2x2x2, a host with v6e:2x4."""
    head = {"num_gpus": 1, "resources": {"accelerator_type:A100": 1}}
    others: list[Machine] = [({"num_gpus": 4, "resources": {"accelerator_type:H100": 1}}, {})]
    for name, worker, kind, shape, chips in TPU_HOSTS:
        variables = {"TPU_NAME": name, "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": kind}
        others.append(({"resources": {"TPU": chips}}, {**variables, "TPU_TOPOLOGY": shape}))
    with machines(head, others, warm_interpreter) as made:
        yield made


def on(trainer: str, workers: str, reference: str | None = None) -> RLExperiment.Config:
    """Return the tiny experiment on a fleet."""
    return place(tiny_experiment(fleet=Fleet.Config(trainer=trainer, workers=workers, reference=reference))).cfg


class Reserved:
    """A reservation, and probes in its slots."""

    def __init__(
        self,
        trainer: str,
        workers: str,
        tmp_path: Path,
        *,
        reference: str | None = None,
        limit: float = 60.0,
        stop: bool = False,
    ):
        cfg = on(trainer, workers, reference)
        requests, names = role_requests(cfg, ()), process_groups(cfg)
        log, timeouts = EventLog(tmp_path / "events.jsonl"), Timeouts.Config(restart=limit, warn_after=0.5)
        self.said: list[str] = []
        wait = DeviceWait(timeouts, self.said.append, log, lambda: stop)
        self.reservation = Reservation.make(requests, names, wait)
        self.names = [name for role in names.values() for instance in role for name in instance]

    def __enter__(self) -> "Reserved":
        return self

    def __exit__(self, *_: Any) -> None:
        self.reservation.release()
        await_free()

    def probe(self, name: str) -> Any:
        """Start an actor in the slot of this process, which comes back when it dies."""
        ray, Probe = ray_module(), importlib.import_module("tests.rl.runtime.ray.probe").Probe
        slot = self.reservation.slot(name)
        assert slot is not None
        variables, options = slot.request.environment(os.environ), slot.options()
        return ray.remote(Probe).options(num_cpus=0, max_restarts=-1, **options).remote(slot.request, variables)

    def seen(self, role: str = "") -> dict[str, dict[str, str]]:
        """Return what each process of a role, or of both, sees of its devices, and its host."""
        ray = ray_module()

        probes = {name: self.probe(name) for name in self.names if name.startswith(role)}
        found = {name: ray.get(probe.seen.remote(), timeout=120) for name, probe in probes.items()}
        for probe in probes.values():
            ray.kill(probe)
        return found


def restarted(probe: Any, pid: str) -> dict[str, str]:
    """Return what a probe sees once it has another pid."""
    ray = ray_module()

    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        with contextlib.suppress(ray.exceptions.RayActorError):
            if (seen := ray.get(probe.seen.remote(), timeout=60))["pid"] != pid:
                return seen
        time.sleep(0.1)
    raise AssertionError("it did not come back")


def await_free() -> None:
    """Wait until the whole cluster is free again: what is given back is free a little later."""
    ray = ray_module()

    give_up = time.monotonic() + 30
    while any(ray.available_resources().get(kind) != ray.cluster_resources()[kind] for kind in ("GPU", "TPU")):
        assert time.monotonic() < give_up, ray.available_resources()
        time.sleep(0.1)


@pytest.mark.full  # in every run roles share a GPU, and hosts of slices and parts of hosts are placed
def test_processes_have_their_own_gpus_and_come_back_to_them(cluster: Any, tmp_path: Path) -> None:
    ray = ray_module()

    with Reserved("h100:2", "2 x h100:1", tmp_path) as reserved:
        seen = reserved.seen()
        gpus = {name: one["CUDA_VISIBLE_DEVICES"].split(",") for name, one in seen.items()}
        assert [len(gpus[name]) for name in ("trainer", "worker-0", "worker-1")] == [2, 1, 1]
        assert sorted(sum(gpus.values(), [])) == ["0", "1", "2", "3"], "none is shared"
        assert {one["host"] for one in seen.values()} == {GPUS}
        probe = reserved.probe("worker-1")
        before = ray.get(probe.seen.remote())
        os.kill(int(before["pid"]), signal.SIGKILL)
        after = restarted(probe, before["pid"])
        assert after["CUDA_VISIBLE_DEVICES"] == before["CUDA_VISIBLE_DEVICES"] == gpus["worker-1"][0]


@pytest.mark.full
def test_gpus_of_a_model_are_on_its_hosts_and_those_of_any_model_anywhere(cluster: Any, tmp_path: Path) -> None:
    with Reserved("a100:1", "gpu:4", tmp_path) as reserved:
        assert {name: one["host"] for name, one in reserved.seen().items()} == {
            "trainer": "127.0.0.1",
            "worker-0": GPUS,
        }


def test_roles_share_a_gpu_with_their_shares_of_its_memory(cluster: Any, tmp_path: Path) -> None:
    with Reserved("h100:0.5", "2 x h100:0.25", tmp_path) as reserved:
        seen = reserved.seen()
    assert len({one["CUDA_VISIBLE_DEVICES"] for one in seen.values()}) == 1, seen
    assert [seen[name][MEMORY_FRACTION] for name in reserved.names] == ["0.4500", "0.2250", "0.2250"]


def test_a_trainer_has_the_hosts_of_one_slice_in_their_order_and_workers_have_parts_of_a_host(
    cluster: Any, tmp_path: Path
) -> None:
    with Reserved("v5p:2x2x2", "2 x v6e:2x2", tmp_path) as reserved:
        seen = reserved.seen()
    hosts = [seen[name] for name in ("trainer", "trainer-1")]
    assert [one["TPU_WORKER_ID"] for one in hosts] == ["0", "1"] and len({one["TPU_NAME"] for one in hosts}) == 1
    workers = [seen[name] for name in ("worker-0", "worker-1")]
    assert {one["TPU_NAME"] for one in workers} == {"single"}
    assert sorted(one["TPU_VISIBLE_CHIPS"] for one in workers) == ["0,1,2,3", "4,5,6,7"]
    assert {one["TPU_CHIPS_PER_PROCESS_BOUNDS"] for one in workers} == {"2,2,1"}
    assert not any("TPU_CHIPS_PER_PROCESS_BOUNDS" in one for one in hosts)


@pytest.mark.full
def test_each_worker_over_several_hosts_has_a_slice_of_its_own(cluster: Any, tmp_path: Path) -> None:
    with Reserved("h100:1", "2 x v5p:2x2x2", tmp_path) as reserved:
        seen = reserved.seen("worker")
    workers = [[seen[name] for name in names] for names in (("worker-0", "worker-0-1"), ("worker-1", "worker-1-1"))]
    for hosts in workers:
        assert [one["TPU_WORKER_ID"] for one in hosts] == ["0", "1"] and len({one["TPU_NAME"] for one in hosts}) == 1
    assert {hosts[0]["TPU_NAME"] for hosts in workers} == {"first", "second"}


@pytest.mark.full
def test_a_reference_over_several_hosts_has_those_of_a_slice_in_their_order(cluster: Any, tmp_path: Path) -> None:
    with Reserved("h100:1", "1 x h100:1", tmp_path, reference="v5p:2x2x2") as reserved:
        seen = reserved.seen("reference")
    hosts = [seen[name] for name in ("reference", "reference-1")]
    assert [one["TPU_WORKER_ID"] for one in hosts] == ["0", "1"] and len({one["TPU_NAME"] for one in hosts}) == 1
    with pytest.raises(UserError, match="needs 5 H100 GPUs: trainer 1, 1 x worker 1, reference 3; the Ray cluster has"):
        Reserved("h100:1", "1 x h100:1", tmp_path, reference="h100:3")


@pytest.mark.full
def test_gpus_of_a_worker_over_hosts_are_on_several(cluster: Any, tmp_path: Path) -> None:
    with Reserved("h100:1", "1 x 2 x gpu:1", tmp_path) as reserved:
        seen = reserved.seen("worker")
    assert {one["host"] for one in seen.values()} == {"127.0.0.1", GPUS}


@pytest.mark.full
def test_a_small_part_of_a_host_does_not_break_a_larger_one(cluster: Any, tmp_path: Path) -> None:
    with Reserved("v6e:1x1", "v6e:2x2", tmp_path) as reserved:
        seen = reserved.seen()
    assert seen["worker-0"]["TPU_VISIBLE_CHIPS"] in ("0,1,2,3", "4,5,6,7")
    assert seen["trainer"]["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"


@pytest.mark.full
def test_a_trainer_over_two_slices_has_the_first_ones_hosts_first(cluster: Any, tmp_path: Path) -> None:
    with Reserved("2 x v5p:2x2x2", "4 x v6e:1x1", tmp_path) as reserved:
        seen = reserved.seen("trainer")
        assert reserved.reservation.slot("trainer").request.slices == 2  # pyright: ignore
    hosts = [seen[name] for name in ("trainer", "trainer-1", "trainer-2", "trainer-3")]
    assert [one["TPU_WORKER_ID"] for one in hosts] == ["0", "1", "0", "1"]
    assert [one["TPU_NAME"] for one in hosts[::2]] == [one["TPU_NAME"] for one in hosts[1::2]]
    assert {one["TPU_NAME"] for one in hosts} == {"first", "second"}


@pytest.mark.parametrize(
    ("trainer", "workers", "message"),
    [
        ("h100:4", "1 x h100:1", "the fleet needs 5 H100 GPUs: trainer 4, 1 x worker 1; the Ray cluster has 4"),
        ("h100:0.5", "8 x h100:0.5", "4.5 H100 GPUs: trainer 0.5, 8 x worker 0.5; the Ray cluster has 4"),
        ("a100:1", "a100:1", "the fleet needs 2 A100 GPUs: trainer 1, 1 x worker 1; the Ray cluster has 1"),
        (
            "2 x gpu:2",
            "h100:1",
            r"the fleet needs 2 hosts with 2 GPUs for the trainer; the Ray cluster has 1 \(.* 4, 1\)",
        ),
        ("2 x v5p:2x2x4", "h100:1", "the fleet needs 2 slices v5p:2x2x4: trainer 2; the Ray cluster has 0"),
        ("3 x v5p:2x2x2", "h100:1", "the fleet needs 3 slices v5p:2x2x2: trainer 3; the Ray cluster has 2"),
        # Chips of another generation, and hosts of a slice that is larger, are others.
        ("h100:1", "2 x v5e:2x2", "the fleet needs 8 v5e chips: 2 x worker 4; the Ray cluster has 0"),
        ("h100:1", "v5p:2x2x1", "the fleet needs 4 v5p chips: 1 x worker 4; the Ray cluster has 0"),
    ],
)
def test_a_cluster_without_room_is_refused_with_the_arithmetic(
    trainer: str, workers: str, message: str, cluster: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        Reserved(trainer, workers, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("trainer", "workers"), [("h100:3", "h100:1"), ("v5p:2x2x2", "v6e:2x4")])
def test_devices_that_others_use_are_awaited_and_then_refused(
    trainer: str, workers: str, cluster: Any, tmp_path: Path
) -> None:
    with Reserved("2 x v5p:2x2x2", "2 x h100:1", tmp_path):
        with pytest.raises(UserError, match=r"trainer are not free after 2 s .*; 3 GPUs, 8 TPU chips are free"):
            Reserved(trainer, workers, tmp_path, limit=2.0)
        with pytest.raises(Stopped):
            Reserved(trainer, workers, tmp_path, limit=60.0, stop=True)
    waited = events(tmp_path, "waiting", "driver")
    assert waited and waited[0]["what"] == "devices of the trainer"


def test_a_cluster_with_accelerators_needs_a_described_fleet(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    none: Mapping[str, RoleRequest] = {}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    refuse_accelerators(none)  # CPUs on purpose
    monkeypatch.delenv("JAX_PLATFORMS")
    refuse_accelerators(role_requests(on("h100:1", "h100:1"), ()))
    with pytest.raises(
        UserError, match="the Ray cluster has 1 A100 GPUs, 4 H100 GPUs, 16 TPU-V5P chips, 8 TPU-V6E chips, and fleet"
    ):
        refuse_accelerators(none)


@pytest.mark.full
def test_a_run_on_described_devices_ends_and_a_killed_worker_has_its_own_again(cluster: Any, tmp_path: Path) -> None:
    ray = ray_module()

    cfg = slow(num_steps=8, workers=2, groups_per_lease=1, fleet=Fleet.Config(trainer="h100:2", workers="2 x h100:1"))
    cfg.trainer.mesh = {"fsdp": 2}
    cfg = place(cfg).cfg
    before: dict[str, dict[str, str]] = {}
    after: dict[str, dict[str, str]] = {}

    def look(role: Any) -> dict[str, str]:
        import jax

        return {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "devices": str(len(jax.devices())), "pid": str(os.getpid())}

    def on_step(step: int) -> None:
        if step < 2 or after:
            return
        space = json.loads((tmp_path / "run" / "cluster.json").read_text())["namespace"]
        actors = {name: ray.get_actor(name, namespace=space) for name in ("trainer", "worker-0", "worker-1")}
        try:
            found = {name: ray.get(actor.__ray_call__.remote(look)) for name, actor in actors.items()}
        except ray.exceptions.RayActorError:
            return  # it restarts
        if not before:
            before.update(found)
            os.kill(int(found["worker-0"]["pid"]), signal.SIGKILL)
        elif found["worker-0"]["pid"] != before["worker-0"]["pid"]:
            after.update(found)

    with RunDirectory.open(tmp_path / "run", to_text(cfg)) as run:
        assert run_ray(cfg.build(), run, lambda: False, on_step) == 8
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, 9))
    assert sorted(",".join(one["gpus"] for one in before.values()).split(",")) == ["0", "1", "2", "3"]
    assert [before[name]["devices"] for name in ("trainer", "worker-0")] == ["2", "1"]
    assert after["worker-0"]["gpus"] == before["worker-0"]["gpus"]
    await_free()


@pytest.mark.slow
@pytest.mark.full
def test_the_command_starts_a_fleet_of_cpus_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Command(path, "sharded", "--fleet", "trainer=2xcpu:2,workers=2xcpu:1") as command:
        assert command.wait() == 0, command.output()
    assert [row["step"] for row in metrics(path)] == [1, 2]
    assert {row["role"] for row in events(path, "start")} >= {"trainer", "trainer-1", "worker-0", "worker-1"}
