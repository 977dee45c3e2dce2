"""A process before and after it opens its devices: bounds of a part of a TPU host, and devices that are not there."""

import os

import pytest

from mesh import UserError
from mesh.mesh import PlaceholderDevice
from rl.fleet.fleet import Fleet, place
from rl.fleet.processes import VISIBLE_CHIPS, check_opened, prepare_process
from rl.fleet.requests import RoleRequest, role_requests
from tests.rl.tiny import tiny_experiment


def request(trainer: str) -> RoleRequest:
    cfg = place(tiny_experiment(fleet=Fleet.Config(trainer=trainer, workers="cpu:1"))).cfg
    return role_requests(cfg, [PlaceholderDevice()])["trainer"]


def prepared(devices: str, chips: str | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the bounds after a process was given these chips, with what Ray sets beside them."""
    asked, ray_says = request(devices), {"TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1", "TPU_HOST_BOUNDS": "1,1,1"}
    monkeypatch.setattr(os, "environ", {**ray_says, **({} if chips is None else {VISIBLE_CHIPS: chips})})
    prepare_process(asked)
    return {name: value for name, value in os.environ.items() if "BOUNDS" in name}


@pytest.mark.parametrize(
    ("devices", "chips", "bounds"),
    [
        ("v6e:2x2", "4,5,6,7", "2,2,1"),
        ("v6e:2x4", "0,1,2,3,4,5,6,7", "2,4,1"),
        ("v6e:1x1", "3", "1,1,1"),
        ("v5p:2x2x1", "0,1,2,3", "2,2,1"),
    ],
)
def test_a_part_of_a_host_is_a_slice_of_its_own(devices: str, chips: str, bounds: str, monkeypatch: pytest.MonkeyPatch):
    found = prepared(devices, chips, monkeypatch)
    assert found == {"TPU_CHIPS_PER_PROCESS_BOUNDS": bounds, "TPU_PROCESS_BOUNDS": "1,1,1"}, "none of the old names"
    assert os.environ["TPU_PROCESS_PORT"] == str(8476 + int(chips[0])), "no two parts of a host have the same"


@pytest.mark.parametrize(("devices", "chips"), [("v5p:2x2x2", "0,1,2,3"), ("v6e:2x4", None), ("h100:2", None)])
def test_whole_hosts_and_hosts_of_a_slice_keep_their_own_bounds(
    devices: str, chips: str | None, monkeypatch: pytest.MonkeyPatch
):
    assert "TPU_PROCESS_BOUNDS" not in prepared(devices, chips, monkeypatch)


@pytest.mark.parametrize("chips", ["1,2,3,4", "2,3,4,5", "0,1,2,5"])
def test_chips_that_are_no_slice_are_refused(chips: str, monkeypatch: pytest.MonkeyPatch):
    listed = chips.replace(",", ", ")
    with pytest.raises(UserError, match=f"trainer needs v6e:2x2, 4 chips side by side, .* chips {listed}"):
        prepared("v6e:2x2", chips, monkeypatch)


def test_devices_that_jax_does_not_show_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    gpu, cpu = PlaceholderDevice("gpu", "NVIDIA H100"), PlaceholderDevice()
    check_opened(request("h100:2"), [gpu, gpu])
    check_opened(request("cpu:2"), [cpu, cpu])
    for found in ([cpu, cpu], [gpu]):
        with pytest.raises(UserError, match=r"trainer expected 2 gpu devices .* jax shows \d x .*jax\[cuda13\]"):
            check_opened(request("h100:2"), found)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    check_opened(request("h100:2"), [cpu, cpu])
