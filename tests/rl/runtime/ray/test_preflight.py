"""Preflight checks refuse a run before anything is started."""

import socket
import threading

import pytest

from mesh import UserError
from rl.runtime.ray.devices import capacity
from rl.runtime.ray.preflight import check_cluster, check_machine, check_reachable
from tests.rl.tiny import tiny_experiment


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("nodes", [["10.0.0.1", "10.0.0.2"], ["127.0.0.1", "10.0.0.2"]])
def test_a_parameter_server_on_loopback_is_out_of_reach_of_other_hosts(host: str, nodes: list[str]) -> None:
    with pytest.raises(UserError, match=rf"parameter_server.host='{host}'.*10\.0\.0\.2.*parameter_server.host=0.0.0.0"):
        check_reachable(host, nodes)


@pytest.mark.parametrize(
    ("host", "nodes"),
    [
        ("0.0.0.0", ["10.0.0.1", "10.0.0.2"]),
        ("10.0.0.1", ["10.0.0.1", "10.0.0.2"]),
        ("127.0.0.1", ["127.0.0.1", "127.0.0.2"]),
        ("127.0.0.1", ["10.0.0.1"]),
    ],
)
def test_a_reachable_parameter_server_is_accepted(host: str, nodes: list[str]) -> None:
    check_reachable(host, nodes)


def test_a_cluster_that_is_not_there_is_known_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=rf"no Ray cluster answers at RAY_ADDRESS={address}: .*refused"):
            check_machine(tiny_experiment())
        closed.listen()
        check_cluster(address)
        check_cluster(f"ray://{address}")
    check_cluster("auto")


def test_a_launched_run_waits_until_its_machines_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = iter([1, 1, 3])
    monkeypatch.setenv("AXL_RAY_NODES", "3")
    monkeypatch.setattr(capacity, "_POLL", 0.0)
    monkeypatch.setattr(capacity.ray, "nodes", lambda: [{"Alive": True}] * next(joined) + [{"Alive": False}] * 4)
    said: list[str] = []
    capacity.wait_for_nodes(lambda: False, lambda: None, said.append)
    assert said == ["waiting for machines: 1 of 3 have joined"] and next(joined, None) is None
    capacity.wait_for_nodes(lambda: True, lambda: None, said.append)  # the run was stopped
    monkeypatch.delenv("AXL_RAY_NODES")
    capacity.wait_for_nodes(lambda: False, lambda: None, said.append)


def test_a_launched_run_waits_for_ray_which_starts_beside_it() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        timer = threading.Timer(0.2, probe.listen)
        timer.start()
        check_cluster(f"127.0.0.1:{port}", wait=20.0)
        timer.join()
