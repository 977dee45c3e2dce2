"""A run over several hosts with networks of their own, which are cut off one after another."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from rl.audit.invariants import check_run
from tests.chaos.experiments import calm
from tests.chaos.hosts import Hosts, permitted
from tools.bench.recovery.compare import compare, make_undisturbed
from tools.bench.recovery.run import DRIVER, WatchedRun

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not permitted(), reason="network namespaces are not permitted here"),
]

PORT = 6399
TIMEOUT = 300.0  # seconds
QUICK = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}
# As in a shell: what rl.runtime.ray has set in this process is for Ray on loopback.
ENVIRON = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
RAY = "from ray.scripts.scripts import main; main()"


@contextlib.contextmanager
def cluster(hosts: Hosts, count: int) -> Iterator[str]:
    """Start Ray on these hosts, its head on the first; yields the address."""
    address, nodes = f"{hosts.address(1)}:{PORT}", []
    environ = {**os.environ, **ENVIRON}
    try:
        for number in range(1, count + 1):
            first = ["--head", f"--port={PORT}", f"--system-config={json.dumps(QUICK)}", "--include-dashboard=false"]
            where = first if number == 1 else [f"--address={address}"]
            words = ["start", "--block", "--num-cpus=1", f"--node-ip-address={hosts.address(number)}", *where]
            command = [*hosts.on(number), sys.executable, "-c", RAY, *words]
            nodes.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, start_new_session=True))
            time.sleep(5.0)
        yield address
    finally:
        for node in nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(node.pid).children(recursive=True):
                    process.kill()
            node.kill()
            node.wait()


def test_hosts_are_cut_off_one_after_another_and_the_run_continues_without_them(tmp_path) -> None:
    arguments = ("--set", "parameter_server.host=0.0.0.0", "--set", "workers=3")
    with Hosts(3) as hosts, cluster(hosts, 3) as address:
        environ = {**ENVIRON, "RAY_ADDRESS": address, "AXL_RAY_NODES": "3"}  # a busy machine's nodes come late
        experiment = "tests.chaos.experiments:endless"
        with WatchedRun(tmp_path / "run", experiment, arguments, environ=environ, wrap=hosts.on(1)) as run:
            run.start()
            run.wait_for("five updates", lambda: run.step >= 5, TIMEOUT)
            lost = [role for number in (2, 3) for role in _cut_off(number, hosts, run)]
            assert any(role.startswith("worker-") for role in lost), "workers are spread"
            assert run.stop() == 0
            assert [line for finding in check_run(run.run_dir) for line in finding.broken] == []
            outcome = compare(run.run_dir, make_undisturbed(tmp_path / "calm", calm(run.step)), run.step)
            assert outcome["bit_identical"], outcome


def _cut_off(number: int, hosts: Hosts, run: WatchedRun) -> list[str]:
    """Cut off a host: its roles start on other hosts, and have ended there when it is connected again.

    Returns:
        Its roles. A busy machine's Ray may place one elsewhere than it was asked to, so there may be none.
    """
    run.look()
    there = {role: run.pid(role) for role in run.roles() if role != DRIVER and hosts.holds(number, run.pid(role))}
    starts = {role: run.count("start", role) for role in there}
    run.note("cut", target=f"host {number}", roles=sorted(there))
    hosts.pull(number)
    for role in there:
        run.wait_for(f"{role} on another host", lambda r=role: run.count("start", r) > starts[r], TIMEOUT)
    run.wait_for_update("an update without the lost host")
    hosts.plug(number)
    gone = lambda: not any(map(psutil.pid_exists, there.values()))  # noqa: E731
    run.wait_for("the end of the roles on the lost host", gone, TIMEOUT)
    run.wait_for_update("an update after that")
    return sorted(there)
