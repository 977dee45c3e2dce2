"""The Ray cluster of a launched run: head and nodes, with Ray's own processes and a stand-in that dies."""

import json
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tools.launch.process.started import start
from tools.launch.process.ray_cluster import ended_path


@pytest.mark.full
def test_a_head_whose_ray_does_not_start_ends_and_so_does_its_command(tmp_path: Path):
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "POD_IP": "127.0.0.1"}
    head = start(tmp_path, "head", "--port", "16379", "--", "sleep", "1000", **path)  # of Ray's own
    output, _ = head.communicate(timeout=100)
    assert head.returncode == 70 and "ray start ended with status" in output, output
    log = tmp_path / "launch" / "logs" / "run-trainer-0.log"
    assert json.loads(log.with_suffix(".exit.json").read_text())["status"] == 143
    assert not ended_path(tmp_path).exists()


@pytest.mark.parametrize("status", [0, 2])
def test_a_head_that_has_lost_ray_restarts_whatever_its_command_returns(status: int, tmp_path: Path):
    """A driver whose Ray has died ends as if it was stopped, or blames the cluster: neither is the end of the run."""
    ray = tmp_path / "python"  # by which the head starts Ray
    ray.write_text(f"#!/bin/bash\nuntil [ -e {tmp_path / 'go'} ]; do sleep 0.02; done; exit 1\n")
    ray.chmod(0o755)
    code = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))
pathlib.Path({str(tmp_path / "go")!r}).touch()
time.sleep(60)
"""
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_IP": "127.0.0.1"}
    head = start(tmp_path, "head", "--port", "1", "--", sys.executable, "-c", code, **path)
    output, _ = head.communicate(timeout=60)
    assert head.returncode == 70 and "ray start ended with status 1" in output, output
    assert not ended_path(tmp_path).exists()


@pytest.mark.full
def test_a_head_and_a_node_are_one_cluster_until_the_command_has_ended(tmp_path: Path):
    """Real Ray with a token: the command sees both nodes, the node ends with the run, and nothing is left."""
    port, token, host = 26379, "0" * 64, own_address()
    code = """
import ray, time
ray.init("auto", log_to_driver=False)
deadline = time.monotonic() + 90
while len([n for n in ray.nodes() if n["Alive"]]) < 2 and time.monotonic() < deadline:
    time.sleep(0.5)
print("nodes", len([n for n in ray.nodes() if n["Alive"]]), flush=True)
"""
    variables = {
        "POD_IP": host,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    node = start(tmp_path, "node", "--name", "run-worker", "--head", f"{host}:{port}", **variables)
    head = start(tmp_path, "head", "--port", str(port), "--", sys.executable, "-c", code, **variables)
    try:
        output, _ = head.communicate(timeout=200)
        joined = tmp_path / "launch" / "logs" / "run-worker-0.log"
        assert head.returncode == 0 and "nodes 2" in output, joined.read_text() if joined.exists() else output
        assert node.wait(timeout=60) == 0, node.stdout
        deadline = time.monotonic() + 30
        while (left := _raylets(port)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert left == []
    finally:
        for one in (head, node):
            one.kill()


def own_address() -> str:
    """Return this machine's address in its network: Ray joins no second node on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return probe.getsockname()[0]


def _raylets(port: int) -> list[list[str]]:
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in found if any(f":{port}" in word for word in command)]
